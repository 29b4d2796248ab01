"""Translates errors of a cloud, its library or Ray's launcher to error fields."""

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
     Code.CLOUD_QUOTA, "request a higher quota in {where}, or use a smaller `instance` or fewer nodes"),
    (r"InsufficientInstanceCapacity|ZONE_RESOURCE_POOL_EXHAUSTED|SkuNotAvailable|AllocationFailed",
     Code.CLOUD_CAPACITY, "use another zone in `zones` or another `instance`, or try later"),
    (r"Could not connect to the endpoint URL|EndpointConnectionError|InvalidRegion|Invalid value for field 'region'"
     r"|LocationNotAvailable", Code.CLOUD_REGION, "check that `{where}` is a region of {backend} and reachable from this computer"),
    (r"iam:\w+|iam\.", Code.CLOUD_IAM, "set {backend}.profile to an existing instance profile, or request permission to create roles"),
    (r"UnauthorizedOperation|AccessDenied|AuthorizationFailed|PERMISSION_DENIED|does not have permission",
     Code.CLOUD_PERMISSION, "ask the administrator of the account for the permission named above"),
    (r"InvalidAMIID|image .* not found|ImageNotFound", Code.CLOUD_IMAGE, "{backend}.image must name an image of {where}"),
    (r"InvalidKeyPair", Code.CLOUD_KEY_PAIR, "{backend}.key_name must name a key pair of {where}; without it, a new one is created"),
    (r"InvalidSubnet|No usable subnets|InvalidVpc", Code.CLOUD_NETWORK, "{backend}.subnets: [subnet-…] of {where}, with public addresses"),
    (r"Unsupported|InvalidInstanceType|machineType", Code.CLOUD_INSTANCE_TYPE, "check that {where} offers the `instance`"),
)  # fmt: skip


def full_text(error: BaseException) -> str:
    """The text of an error and of its causes."""
    parts: list[str] = []
    seen: BaseException | None = error
    while seen is not None and len(parts) < 8:
        parts.append(f"{type(seen).__name__}: {seen}")
        seen = seen.__cause__ or seen.__context__
    return "\n".join(parts)


def summarize(error: BaseException) -> str:
    """The error in one line; with its cause if the text is short, as Ray's often is."""
    text = " ".join(ANSI.sub("", str(error)).split())
    reason = error.__cause__ or error.__context__
    if reason is not None and len(text) < 60:
        more = " ".join(ANSI.sub("", str(reason)).split())
        text = f"{text.rstrip('.')}: {more}" if more and more not in text else text
    return (text or type(error).__name__)[:400]


def explain(error: BaseException, config: Mapping[str, Any]) -> dict[str, str]:
    provider = config["provider"]
    backend = str(provider["type"])
    if isinstance(error, HeliostatError):
        return {key: str(getattr(error, key)) for key in ("code", "message", "cause", "hint")}
    text = full_text(error)
    if isinstance(error, ImportError) or "ModuleNotFoundError" in text:
        name = getattr(error, "name", None) or PACKAGES.get(backend, "")
        return {
            "code": Code.CLOUD_MISSING_PACKAGE,
            "message": f"a Python package for `{backend}` is missing",
            "cause": summarize(error) or f"no module `{name}`",
            "hint": f"pip install 'heliostat[{backend}]'",
        }
    where = str(provider.get("region") or provider.get("location") or "that region")
    found = ((code, hint) for pattern, code, hint in HINTS if re.search(pattern, text))
    code, hint = next(found, (Code.CLOUD_FAILED, ""))
    return {
        "code": code,
        "message": f"`{backend}` rejected the request",
        "cause": summarize(error),
        "hint": hint.format(backend=backend, where=where, log_in=LOG_IN.get(backend, "")),
    }
