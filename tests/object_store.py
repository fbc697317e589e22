"""A local S3 server (moto) that commands in other processes reach as `s3://`."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def s3_bucket() -> Iterator[str]:
    """The URL of a new bucket; the environment points to its server until the block ends."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        # fsspec keeps its connections, also those to the server of an earlier test.
        s3fs.S3FileSystem.clear_instance_cache()
        with mock.patch.dict(os.environ, variables):
            name = f"bucket-{uuid.uuid4().hex[:8]}"
            boto3.client("s3").create_bucket(Bucket=name)
            yield f"s3://{name}"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
