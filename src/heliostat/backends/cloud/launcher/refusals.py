"""Translates errors of a cloud, its library or Ray's launcher into the fields of our errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from heliostat.common.errors import Code, HeliostatError

ANSI = re.compile(r"\x1b\[[0-9;]*m")
PACKAGES = {"aws": "boto3", "gcp": "googleapiclient", "azure": "azure"}
LOG_IN = {
    "aws": "aws configure, or export AWS_PROFILE=NAME",
    "gcp": "gcloud auth application-default login",
    "azure": "az login",
}


# pattern of the error's text (or of its class name), code, hint; fields: {backend}, {where}, {log_in}
HINTS: tuple[tuple[str, Code, str], ...] = (
    (r"Unable to locate credentials|NoCredentials|CredentialUnavailable|DefaultCredentials|PartialCredentials"
     r"|AuthFailure|InvalidClientTokenId|ExpiredToken|RefreshError|SignatureDoesNotMatch|azureProfile|DefaultAzureCredential|ClientAuthentication", Code.CLOUD_CREDENTIALS, "{log_in}"),
    (r"VcpuLimitExceeded|InstanceLimitExceeded|MaxSpotInstanceCountExceeded|QuotaExceeded|Quota '|quota",
     Code.CLOUD_QUOTA, "ask the cloud for a higher quota in {where}, or take a smaller `instance` or fewer nodes"),
    (r"InsufficientInstanceCapacity|ZONE_RESOURCE_POOL_EXHAUSTED|SkuNotAvailable|AllocationFailed",
     Code.CLOUD_CAPACITY, "another of the `zones`, another `instance`, or later"),
    (r"Could not connect to the endpoint URL|EndpointConnectionError|InvalidRegion|Invalid value for field 'region'"
     r"|LocationNotAvailable", Code.CLOUD_REGION, "is `{where}` a region of {backend}, and can this machine reach it?"),
    (r"iam:\w+|iam\.", Code.CLOUD_IAM, "name an instance profile that exists in {backend}.profile, or ask for rights to make roles"),
    (r"UnauthorizedOperation|AccessDenied|AuthorizationFailed|PERMISSION_DENIED|does not have permission",
     Code.CLOUD_PERMISSION, "ask whoever runs the account for the right that is named above"),
    (r"InvalidAMIID|image .* not found|ImageNotFound", Code.CLOUD_IMAGE, "{backend}.image must name an image of {where}"),
    (r"InvalidKeyPair", Code.CLOUD_KEY_PAIR, "{backend}.key_name must name a key pair of {where}, or leave it out: one is made"),
    (r"InvalidSubnet|No usable subnets|InvalidVpc", Code.CLOUD_NETWORK, "{backend}.subnets: [subnet-…] of {where}, with public addresses"),
    (r"Unsupported|InvalidInstanceType|machineType", Code.CLOUD_INSTANCE_TYPE, "is that `instance` offered in {where}?"),
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
    backend = str(provider["type"])
    if isinstance(error, HeliostatError):
        return {key: str(getattr(error, key)) for key in ("code", "message", "cause", "hint")}
    said = whole(error)
    if isinstance(error, ImportError) or "ModuleNotFoundError" in said:
        name = getattr(error, "name", None) or PACKAGES.get(backend, "")
        return {
            "code": Code.CLOUD_MISSING_PACKAGE,
            "message": f"the site `{backend}` needs packages that are not here",
            "cause": last_words(error) or f"no module `{name}`",
            "hint": f"pip install 'heliostat[{backend}]'",
        }
    where = str(provider.get("region") or provider.get("location") or "that region")
    found = ((code, hint) for pattern, code, hint in HINTS if re.search(pattern, said))
    code, hint = next(found, (Code.CLOUD_FAILED, ""))
    return {
        "code": code,
        "message": f"`{backend}` did not do what was asked",
        "cause": last_words(error),
        "hint": hint.format(backend=backend, where=where, log_in=LOG_IN.get(backend, "")),
    }
