"""What a cloud, its library or Ray's launcher says when it refuses, as our four lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ANSI = re.compile(r"\x1b\[[0-9;]*m")
PACKAGES = {"aws": "boto3", "gcp": "googleapiclient", "azure": "azure"}
LOG_IN = {
    "aws": "aws configure, or export AWS_PROFILE=NAME",
    "gcp": "gcloud auth application-default login",
    "azure": "az login",
}


class Refused(Exception):
    """Said by us, in the fields of an error."""

    def __init__(self, what: str, because: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.because, self.hint = what, because, hint


# what is in the words of the refusal (or the name of its kind) -> what a person can do; {site}, {where}, {log_in}
HINTS: tuple[tuple[str, str], ...] = (
    (r"Unable to locate credentials|NoCredentials|CredentialUnavailable|DefaultCredentials|PartialCredentials"
     r"|AuthFailure|InvalidClientTokenId|ExpiredToken|RefreshError|SignatureDoesNotMatch|azureProfile|DefaultAzureCredential|ClientAuthentication", "{log_in}"),
    (r"VcpuLimitExceeded|InstanceLimitExceeded|MaxSpotInstanceCountExceeded|QuotaExceeded|Quota '|quota",
     "ask the cloud for a higher quota in {where}, or take a smaller `instance` or fewer nodes"),
    (r"InsufficientInstanceCapacity|ZONE_RESOURCE_POOL_EXHAUSTED|SkuNotAvailable|AllocationFailed",
     "another of the `zones`, another `instance`, or later"),
    (r"Could not connect to the endpoint URL|EndpointConnectionError|InvalidRegion|Invalid value for field 'region'"
     r"|LocationNotAvailable", "is `{where}` a region of {site}, and can this machine reach it?"),
    (r"iam:\w+|iam\.", "name an instance profile that exists in {site}.profile, or ask for rights to make roles"),
    (r"UnauthorizedOperation|AccessDenied|AuthorizationFailed|PERMISSION_DENIED|does not have permission",
     "ask whoever runs the account for the right that is named above"),
    (r"InvalidAMIID|image .* not found|ImageNotFound", "{site}.image must name an image of {where}"),
    (r"InvalidKeyPair", "{site}.key_name must name a key pair of {where}, or leave it out: one is made"),
    (r"InvalidSubnet|No usable subnets|InvalidVpc", "{site}.subnets: [subnet-…] of {where}, with public addresses"),
    (r"Unsupported|InvalidInstanceType|machineType", "is that `instance` offered in {where}?"),
)  # fmt: skip


def whole(error: BaseException) -> str:
    """All that an error and those behind it say."""
    parts: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(parts) < 8:
        parts.append(f"{type(seen).__name__}: {seen}")
        seen = seen.__cause__ or seen.__context__
    return "\n".join(parts)


def last_words(error: BaseException) -> str:
    """What it says itself, on one line; where Ray only says that it failed, what was behind that."""
    text = " ".join(ANSI.sub("", str(error)).split())
    behind = error.__cause__ or error.__context__
    if behind is not None and len(text) < 60:
        more = " ".join(ANSI.sub("", str(behind)).split())
        text = f"{text.rstrip('.')}: {more}" if more and more not in text else text
    return (text or type(error).__name__)[:400]


def explain(error: BaseException, config: Mapping[str, Any]) -> dict[str, str]:
    provider = config["provider"]
    site = str(provider["type"])
    if isinstance(error, Refused):
        return {"what": error.what, "because": error.because, "hint": error.hint}
    said = whole(error)
    if isinstance(error, ImportError) or "ModuleNotFoundError" in said:
        name = getattr(error, "name", None) or PACKAGES.get(site, "")
        return {
            "what": f"the site `{site}` needs packages that are not here",
            "because": last_words(error) or f"no module `{name}`",
            "hint": f"pip install 'heliostat[{site}]'",
        }
    where = str(provider.get("region") or provider.get("location") or "that region")
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, said)), "")
    return {
        "what": f"`{site}` did not do what was asked",
        "because": last_words(error),
        "hint": hint.format(site=site, where=where, log_in=LOG_IN.get(site, "")),
    }
