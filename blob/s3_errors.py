"""Sorts what boto3 raises: by what the caller should do, naming the setting where one is wrong."""

from __future__ import annotations

from botocore import exceptions as boto
from urllib3.exceptions import HTTPError

from blob.errors import BlobError, BlobMisconfigured, BlobNotFound, BlobUnavailable

_SETTINGS = {
    "NoSuchBucket": "the bucket name",
    "InvalidBucketName": "the bucket name",
    "InvalidAccessKeyId": "the access key (AWS_ACCESS_KEY_ID)",
    "SignatureDoesNotMatch": "the secret key (AWS_SECRET_ACCESS_KEY)",
    "InvalidToken": "the session token (AWS_SESSION_TOKEN)",
    "ExpiredToken": "the session token (AWS_SESSION_TOKEN): it has expired",
    "RequestTimeTooSkewed": "this machine's clock",
    "AccessDenied": "the credentials and their rights to get, put, delete and list",
    "403": "the credentials and their rights to get, put, delete and list",
    "PermanentRedirect": "region and endpoint",
    "301": "region and endpoint",
    "AuthorizationHeaderMalformed": "region",
    "IllegalLocationConstraintException": "region",
}
_MISSING = {"NoSuchKey", "404", "NotFound", "InvalidRange", "416"}
_FOR_NOW = {
    "NoSuchUpload",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "QuotaExceeded",
}

_WRONG_SETUP = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.NoRegionError,
    boto.InvalidRegionError,
    boto.ProfileNotFound,
    boto.ParamValidationError,
    boto.SSLError,
    boto.InvalidEndpointConfigurationError,
)


class Refused(Exception):
    """The store refused a conditional put. `why`: `exists`, `race` (try again) or `unsupported`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def translate(error: Exception, key: str, url: str) -> BlobError | Refused | None:
    """The error to raise instead, or None if `error` is not the store's (a bug, or sorted already)."""
    if isinstance(error, boto.ClientError):
        return _answer(error, key, url)
    if isinstance(error, _WRONG_SETUP):
        return BlobMisconfigured(f"{url} cannot be used; check the credentials, region and endpoint: {error}")
    if isinstance(error, boto.BotoCoreError | HTTPError | OSError):
        return BlobUnavailable(f"{url} did not answer: {error}")
    return None


def _answer(error: boto.ClientError, key: str, url: str) -> BlobError | Refused:
    said = error.response.get("Error", {})
    code = str(said.get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in _SETTINGS:
        return BlobMisconfigured(f"{url} refuses; check {_SETTINGS[code]}: {code} {said.get('Message', '')}".rstrip())
    if code == "PreconditionFailed" or status == 412:
        return Refused("exists")
    if code == "ConditionalRequestConflict" or (status == 409 and error.operation_name == "PutObject"):
        return Refused("race")
    if code == "NoSuchKey" and error.operation_name == "PutObject":  # Ceph, where two puts of one key meet
        return Refused("race")
    if status == 501 and error.operation_name in ("PutObject", "CompleteMultipartUpload"):
        return Refused("unsupported")
    if code in _FOR_NOW:
        return BlobUnavailable(f"{url} refused for now: {code} {said.get('Message', '')}".rstrip())
    if code in _MISSING or status in (404, 416):
        return BlobNotFound(f"no blob {key}, or it ends before the range asked for ({code})")
    if status >= 500 or status in (408, 429) or status == 0:
        return BlobUnavailable(f"{url} refused for now: {code} {said.get('Message', '')}".rstrip())
    return BlobMisconfigured(f"{url} refused {error.operation_name}: {code} {said.get('Message', '')}".rstrip())
