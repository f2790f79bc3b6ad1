# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A server that stands for the operator of Kubeflow Trainer where it takes the status of a job: TLS
with an authority of its own, a token, and the operator's rules for a status.
"""

from __future__ import annotations

import datetime as dt
import http.server
import json
import ssl
import threading
from typing import TYPE_CHECKING, Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

if TYPE_CHECKING:
    from pathlib import Path

PATH: Final = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/train/status"
TOKEN: Final = "a.token.of-the-pod"


class Operator:
    """The operator's server. It records the statuses that it takes.

    Attributes:
        statuses: The statuses.
        answer: Status code and text of the answers to requests that it would take.
    """

    def __init__(self, folder: Path) -> None:
        self.statuses: list[dict[str, Any]] = []
        self.refused: list[int] = []
        self.answer: tuple[int, str] = (200, "{}")
        self.token = folder / "token"
        self.token.write_text(f"{TOKEN}\n")
        self.certificate = folder / "ca.crt"
        operator = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                code, text = operator.answer
                if self.path != PATH or self.headers["Authorization"] != f"Bearer {TOKEN}":
                    code, text = 403, "Forbidden"
                if code == 200:
                    operator.statuses.append(json.loads(body)["trainerStatus"])
                else:
                    operator.refused.append(code)
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", "https://127.0.0.1:1/elsewhere")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base names it
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*write_certificate(folder, self.certificate))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://localhost:{self._server.server_port}{PATH}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def variables(self) -> dict[str, str]:
        """Returns the variables that the operator gives to the launcher's container."""
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": self.url,
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self.certificate),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.token),
        }

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def write_certificate(folder: Path, public: Path) -> tuple[Path, Path]:
    """Writes a certificate for `localhost` that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret = folder / "key.pem"
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return public, secret


def check_operators_rules(status: dict[str, Any]) -> None:
    """Checks a status as the schema of the operator's 2.2.0 does."""
    assert set(status) <= {
        "lastUpdatedTime", "progressPercentage", "estimatedRemainingSeconds", "metrics"
    }  # fmt: skip
    assert dt.datetime.fromisoformat(status["lastUpdatedTime"]).tzinfo is not None
    for name, most in (("progressPercentage", 100), ("estimatedRemainingSeconds", 2**31 - 1)):
        assert isinstance(status.get(name, 0), int)
        assert 0 <= status.get(name, 0) <= most
    assert len(status["metrics"]) <= 256
    for metric in status["metrics"]:
        assert set(metric) == {"name", "value"}
        assert all(isinstance(text, str) and 0 < len(text) <= 64 for text in metric.values())
