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
from urllib.parse import urlsplit

import pytest
from tests.storage.credential_front import CredentialFront
from tests.storage.gcs_front import Front
from tests.unity_catalog_server import TOKEN, running_catalog

ROOT = Path(__file__).parents[2]
START = 60
"""Seconds a service may take to start."""
KEY_LIFE_SECONDS = 1.5
"""Seconds that a key of `front` is valid."""


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
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            # Node's servers close and then wait for clients that keep their connections.
            process.kill()
            process.wait(timeout=10)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def free_port():
    """A free port, for services that cannot choose one; if another process takes it, they fail."""
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
    command = [
        program,
        "-backend",
        "memory",
        "-scheme",
        "http",
        "-host",
        "127.0.0.1",
        "-port",
        port,
    ]
    command += ["-public-host", "127.0.0.1", "-external-url", url, "-log-level", "error"]
    with service(command) as process:
        listening(port, process)
        request = urllib.request.Request(
            f"{url}/storage/v1/b?project=test",
            data=json.dumps({"name": "bucket"}).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=10).close()
        account = {
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
            "disable_oauth": True,
        }
        with Front(url) as front:
            yield {"endpoint_url": front.url, "google_service_account_key": json.dumps(account)}
            front.shutdown()


@pytest.fixture(scope="session")
def azure_options(tmp_path_factory):
    """Azurite with one container; the account and its key are the emulator's published ones."""
    program = tool(
        ROOT / ".tools" / "azurite" / "node_modules" / ".bin" / "azurite-blob", "Azurite"
    )
    port = free_port()
    place = tmp_path_factory.mktemp("azurite")
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", port, "--silent"]
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    with service(
        [*command, "--skipApiVersionCheck", "--inMemoryPersistence"], cwd=place
    ) as process:
        listening(port, process)
        endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
        text = f"AccountName=devstoreaccount1;AccountKey={key};BlobEndpoint={endpoint}"
        blob = pytest.importorskip(
            "azure.storage.blob", reason="azure-storage-blob is not installed"
        )
        blob.BlobServiceClient.from_connection_string(
            f"DefaultEndpointsProtocol=http;{text}"
        ).create_container("bucket")
        yield {"connection_string": text}


class Hadoop:
    """A mini cluster in a process of its own.

    Args:
        process: the one that runs it.
        place: the directory it keeps its files in.
    """

    def __init__(self, process, place):
        self._process = process
        self.pid = process.pid
        self.place = place
        self.configuration = str(place / "client")
        self.environment = {"HADOOP_CONF_DIR": self.configuration}
        self.url = self._answer("READY").split()[1]

    def _answer(self, word):
        line = next((line for line in self._process.stdout if line.startswith(word)), None)
        assert line is not None, "the cluster has ended"
        return line

    def order(self, text):
        """Lets name nodes change roles, and waits until they have."""
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()
        self._answer("DONE")


@contextlib.contextmanager
def hadoop(tmp_path_factory, *kind):
    """Hadoop's mini cluster of a kind: `plain`, `available` or `secure`."""
    classpath = tool(ROOT / "jvm-shim" / "target" / "classpath", "Hadoop's mini cluster")
    java = shutil.which("java")
    if java is None:
        pytest.skip("there is no java")
    path = f"{classpath.parent / 'test-classes'}{os.pathsep}{classpath.read_text()}"
    # Neither compiled well nor collected in parallel: it lives for seconds, beside others.
    command = [java, "-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", path]
    place = tmp_path_factory.mktemp("hdfs")
    command += ["farandole.MiniDfs", place, *kind]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with service(command, text=True, cwd=tmp_path_factory.mktemp("hadoop"), **pipes) as process:
        yield Hadoop(process, place)


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory):
    """One name node, two data nodes."""
    with hadoop(tmp_path_factory, "plain") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def name_service(tmp_path_factory):
    """Two name nodes behind one name, the first in charge."""
    with hadoop(tmp_path_factory, "available") as cluster:
        yield cluster


@contextlib.contextmanager
def ticketed(tmp_path_factory, protection):
    """A cluster that asks for Kerberos tickets, and protects what travels so; with a ticket of
    `alice`.
    """
    kinit = shutil.which("kinit")
    if kinit is None:
        pytest.skip("there is no kinit (Debian: apt-get install krb5-user)")
    with hadoop(tmp_path_factory, "secure", protection) as cluster:
        tables = cluster.place / "kerberos"
        cluster.environment = {
            "HADOOP_CONF_DIR": cluster.configuration,
            "KRB5_CONFIG": str(tables / "krb5.conf"),
            "KRB5CCNAME": f"FILE:{tables / 'ticket'}",
        }
        command = [kinit, "-k", "-t", tables / "alice.keytab", "alice"]
        subprocess.run(
            command, check=True, timeout=START, env={**os.environ, **cluster.environment}
        )
        yield cluster


@pytest.fixture(scope="session")
def kerberos(tmp_path_factory):
    """Tickets, and data as it is."""
    with ticketed(tmp_path_factory, "authentication") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kerberos_privacy(tmp_path_factory):
    """Tickets, and everything encrypted."""
    with ticketed(tmp_path_factory, "privacy") as cluster:
        yield cluster


@pytest.fixture
def s3_on_disk_options(tmp_path):
    """S3Proxy with its objects in files and one bucket: moto keeps objects in memory, several
    times over while it completes or copies one.
    """
    classpath = tool(ROOT / ".tools" / "s3proxy" / "classpath", "S3Proxy").read_text()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    (tmp_path / "objects" / "bucket").mkdir(parents=True)
    settings = {
        "s3proxy.endpoint": url,
        "s3proxy.authorization": "aws-v2-or-v4",
        "s3proxy.identity": "key",
        "s3proxy.credential": "secret",
        "jclouds.provider": "filesystem-nio2",
        "jclouds.identity": "key",
        "jclouds.credential": "secret",
        "jclouds.filesystem.basedir": tmp_path / "objects",
    }
    properties = tmp_path / "s3proxy.conf"
    properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    log_settings = tmp_path / "logback.xml"
    log_settings.write_text('<configuration><root level="OFF"/></configuration>')
    command = ["java", "-Xmx512m", f"-Dlogback.configurationFile={log_settings}"]
    command += ["-cp", classpath, "org.gaul.s3proxy.Main", "--properties", properties]
    with service(command) as process:
        listening(port, process)
        yield {
            "endpoint_url": url,
            "aws_access_key_id": "key",
            "aws_secret_access_key": "secret",
            "region": "us-east-1",
        }
    shutil.rmtree(tmp_path / "objects")


@pytest.fixture(scope="session")
def s3_options():
    """moto's S3 server in this process, with one bucket; the storage options that reach it."""
    server_module = pytest.importorskip(
        "moto.server", reason="moto is not installed: pip install 'moto[server]'"
    )
    import boto3

    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "key": "id",
        "secret": "hidden",
        "endpoint_url": f"http://{host}:{port}",
        "region_name": "us-east-1",
    }
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


@pytest.fixture
def front(s3_options, monkeypatch):
    """An S3 service whose keys live shortly, and an environment without keys."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "DATABRICKS_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FARANDOLE_STORE_TIMEOUT", "3")
    proxy = CredentialFront(urlsplit(s3_options["endpoint_url"]).netloc, KEY_LIFE_SECONDS)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield proxy
    proxy.close()


@pytest.fixture
def catalog(front, monkeypatch):
    """A workspace of Unity Catalog that gives out keys of `front`."""

    def give_credentials(_):
        keys = front.grant()
        fields = {
            "access_key_id": keys["AccessKeyId"],
            "secret_access_key": keys["SecretAccessKey"],
            "session_token": keys["SessionToken"],
        }
        expires = int((time.time() + front.life) * 1000)
        return {"aws_temp_credentials": fields, "expiration_time": expires}

    with running_catalog() as server:
        monkeypatch.setenv("DATABRICKS_HOST", server.url)
        monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
        server.credentials = give_credentials
        yield server
