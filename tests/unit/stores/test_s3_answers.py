"""Found by the crash tests: what S3 servers answer to a put that meets another try of itself."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from blob.s3_errors import Refused, translate


@pytest.mark.parametrize(("code", "status"), [("ConditionalRequestConflict", 409), ("NoSuchKey", 404)])
def test_a_put_that_meets_another_of_its_key_is_tried_again(code: str, status: int) -> None:
    """Ceph says `NoSuchKey`, which was told as a blob that is missing."""
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    refused = translate(ClientError(answer, "PutObject"), "key", "s3://bucket")
    assert isinstance(refused, Refused)
    assert refused.why == "race"
