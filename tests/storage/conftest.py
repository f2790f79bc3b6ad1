# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Services that stores talk to, each started once: real servers on ports of their own choosing."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
import uuid
from pathlib import Path

import pytest
from tests.storage.gcs_front import Front

ROOT = Path(__file__).parents[2]
START = 60
"""Seconds a service may take to start."""


def tool(path, what):
    """A program that `make test-storage` installs."""
    if not path.exists():
        pytest.skip(f"{what} is not installed: make test-storage does it")
    return path


@contextlib.contextmanager
def service(command, **options):
    """A process of its own, ended at the end."""
    process = subprocess.Popen([str(word) for word in command], **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=30)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def free_port():
    """A port nobody listens on, for services that cannot choose one; another process may take it, then they fail."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def listening(port, process):
    """Waits until a service accepts connections."""
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the service ended with {process.returncode}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port} after {START} s")


@pytest.fixture(scope="session")
def gcs_options():
    """fake-gcs-server with one bucket, behind the XML API's uploads."""
    program = tool(ROOT / ".tools" / "bin" / "fake-gcs-server", "fake-gcs-server")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [program, "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", port]
    command += ["-public-host", "127.0.0.1", "-external-url", url, "-log-level", "error"]
    with service(command) as process:
        listening(port, process)
        request = urllib.request.Request(
            f"{url}/storage/v1/b?project=test",
            data=json.dumps({"name": "bucket"}).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=10).close()
        account = {"client_email": "", "private_key": "", "private_key_id": "", "disable_oauth": True}
        with Front(url) as front:
            yield {"endpoint_url": front.url, "google_service_account_key": json.dumps(account)}
            front.shutdown()


@pytest.fixture(scope="session")
def azure_options(tmp_path_factory):
    """Azurite with one container; the account and its key are the emulator's published ones."""
    program = tool(ROOT / ".tools" / "azurite" / "node_modules" / ".bin" / "azurite-blob", "Azurite")
    port = free_port()
    place = tmp_path_factory.mktemp("azurite")
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", port, "--silent"]
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    with service([*command, "--skipApiVersionCheck", "--inMemoryPersistence"], cwd=place) as process:
        listening(port, process)
        endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
        text = f"AccountName=devstoreaccount1;AccountKey={key};BlobEndpoint={endpoint}"
        blob = pytest.importorskip("azure.storage.blob", reason="azure-storage-blob is not installed")
        blob.BlobServiceClient.from_connection_string(f"DefaultEndpointsProtocol=http;{text}").create_container(
            "bucket"
        )
        yield {"connection_string": text}


@pytest.fixture(scope="session")
def hdfs_options(tmp_path_factory):
    """Hadoop's mini cluster: a name node, two data nodes."""
    classpath = tool(ROOT / "jvm-shim" / "target" / "classpath", "Hadoop's mini cluster")
    java = shutil.which("java")
    if java is None:
        pytest.skip("there is no java")
    command = [java, "-Xmx512m", "-cp", f"{classpath.parent / 'test-classes'}{os.pathsep}{classpath.read_text()}"]
    command += ["farandole.MiniDfs", tmp_path_factory.mktemp("hdfs")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with service(command, text=True, cwd=tmp_path_factory.mktemp("hadoop"), **pipes) as process:
        ready = next((line for line in process.stdout if line.startswith("READY ")), None)
        assert ready is not None, "the cluster did not start"
        yield {"url": ready.split()[1]}


@pytest.fixture(scope="session")
def s3_options():
    """moto's S3 server in this process, with one bucket; the storage options that reach it."""
    server_module = pytest.importorskip("moto.server", reason="moto is not installed: pip install 'moto[server]'")
    import boto3

    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "id", "secret": "hidden", "endpoint_url": f"http://{host}:{port}", "region_name": "us-east-1"}
    client = boto3.client(
        "s3",
        aws_access_key_id="id",
        aws_secret_access_key="hidden",
        endpoint_url=options["endpoint_url"],
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="bucket")
    yield options
    server.stop()


@pytest.fixture
def prefix():
    """A place that no other test uses."""
    return f"t-{uuid.uuid4().hex[:8]}"
