# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The uploads of Google's XML API in front of fake-gcs-server, which knows only the JSON API's.

Reads, listings and deletions pass through as they are; copies and uploads, in one piece or in
parts, become the JSON API's.
"""

import itertools
import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

PASSED_ON = ("range", "content-type", "if-match", "if-none-match")
RETURNED = ("content-type", "content-range", "etag", "last-modified", "x-goog-generation")


class Front(ThreadingHTTPServer):
    """Listens on a free port; `upstream` is the emulator's URL."""

    daemon_threads = True

    def __init__(self, upstream):
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = upstream
        self.uploads = {}
        self.numbers = itertools.count()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if self.command != "HEAD" or "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def request_upstream(self, method, path, body=None, headers=None):
        request = urllib.request.Request(
            self.server.upstream + path, data=body, method=method, headers=headers or {}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read(), response.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers

    def pass_on(self):
        headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
        status, body, theirs = self.request_upstream(self.command, self.path, None, headers)
        kept = {name.replace("-", "_"): theirs[name] for name in RETURNED if name in theirs}
        if self.command == "HEAD":
            kept["Content_Length"] = theirs.get("content-length", "0")
        self.answer(status, body, **kept)

    do_GET = do_HEAD = pass_on  # noqa: N815 - the base class calls them so

    def do_DELETE(self):
        upload = parse_qs(urlsplit(self.path).query).get("uploadId")
        if upload is None:
            self.pass_on()
        else:
            self.server.uploads.pop(upload[0], None)
            self.answer(204)

    def body(self):
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def create(self, path, data):
        bucket, _, name = unquote(path).lstrip("/").partition("/")
        target = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
        generation = self.headers.get("x-goog-if-generation-match")
        if generation is not None:
            target += f"&ifGenerationMatch={generation}"
        status, text, _ = self.request_upstream(
            "POST", target, data, {"Content-Type": "application/octet-stream"}
        )
        return status, text, f'"{json.loads(text).get("etag", "x")}"' if status == 200 else ""

    def copy(self, source):
        (from_bucket, _, from_name), (bucket, _, name) = (
            unquote(path).lstrip("/").partition("/") for path in (source, urlsplit(self.path).path)
        )
        path = f"/storage/v1/b/{from_bucket}/o/{quote(from_name, safe='')}/rewriteTo"
        status, text, _ = self.request_upstream(
            "POST", f"{path}/b/{bucket}/o/{quote(name, safe='')}", b""
        )
        self.answer(status, text)

    def do_PUT(self):
        parts, data = urlsplit(self.path), self.body()
        query = parse_qs(parts.query)
        source = self.headers.get("x-goog-copy-source")
        if source is not None:
            self.copy(source)
            return
        if "uploadId" in query:
            self.server.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = data
            self.answer(200, ETag=f'"part-{query["partNumber"][0]}"')
            return
        status, text, tag = self.create(parts.path, data)
        self.answer(status, b"" if status == 200 else text, ETag=tag)

    def do_POST(self):
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        self.body()
        if "uploads" in query:
            name = str(next(self.server.numbers))
            self.server.uploads[name] = {}
            text = (
                "<InitiateMultipartUploadResult><UploadId>"
                f"{name}</UploadId></InitiateMultipartUploadResult>"
            )
            self.answer(200, text.encode())
            return
        pieces = self.server.uploads.pop(query["uploadId"][0], None)
        if pieces is None:
            self.answer(404, b"<Error><Code>NoSuchUpload</Code></Error>")
            return
        status, text, tag = self.create(
            parts.path, b"".join(pieces[number] for number in sorted(pieces))
        )
        done = (
            f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
        ).encode()
        self.answer(status, done if status == 200 else text, ETag=tag)
