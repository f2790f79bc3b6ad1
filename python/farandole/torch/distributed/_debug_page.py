# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""The page "Farandole Ranks" of torch's debug server. It runs in the server's process, on the
host of rank 0.
"""

from __future__ import annotations

import json
from typing import Any

from torch.distributed.debug._frontend import (
    DebugHandler,
    NavLink,
    Route,
    fetch_all,
    format_fetch_summary,
)

from farandole.torch.distributed.debug import ENDPOINT_NAME

_PAGE_TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}Farandole Ranks{% endblock %}</h1>{% endblock %}
{% block content %}
  {% if summary %}<pre>{{ summary | e }}</pre>{% endif %}
  <table>
    <tr>{% for head in heads %}<th>{{ head | e }}</th>{% endfor %}</tr>
    {% for row in rows %}<tr>{% for cell in row %}<td>{{ cell | e }}</td>{% endfor %}</tr>{% endfor %}
  </table>
{% endblock %}
"""  # noqa: E501
_TABLE_HEADS = (
    "rank",
    "host",
    "process",
    "GPU",
    "local rank",
    "world",
    "process sets",
    "operations under way",
)


class RanksHandler(DebugHandler):
    """The page, and its text for periodic dumps."""

    def routes(self) -> list[Route]:
        """Returns the page's path."""
        return [Route(f"/{ENDPOINT_NAME}", self._render_page)]

    def nav_links(self) -> list[NavLink]:
        """Returns the link to the page."""
        return [NavLink(f"/{ENDPOINT_NAME}", "Farandole Ranks")]

    def templates(self) -> dict[str, str]:
        """Returns the page's template."""
        return {"farandole.html": _PAGE_TEMPLATE}

    def dump(self) -> str | None:
        """Returns the answers of all ranks, one on each line."""
        _, answers = fetch_all(ENDPOINT_NAME, timeout=self.fetch_timeout)
        return "\n".join(answer.text for answer in answers)

    def dump_filename(self) -> str:
        """Returns the beginning of the names of dumps."""
        return ENDPOINT_NAME

    def _render_page(self, request: Any) -> bytes:
        addresses, answers = fetch_all(ENDPOINT_NAME, timeout=self.fetch_timeout)
        rows = [
            _table_row(json.loads(answer.text))
            for answer in answers
            if answer.status_code == 200  # noqa: PLR2004
        ]
        summary = format_fetch_summary(addresses, answers)
        return request.frontend.render_template(
            "farandole.html", heads=_TABLE_HEADS, rows=rows, summary=summary
        )


def _table_row(status: dict[str, Any]) -> list[str]:
    sets = "; ".join(f"{number}: {ranks}" for number, ranks in status["process_sets"].items())
    waits = "; ".join(f"{one['name']} for {one['seconds']:.1f} s" for one in status["under_way"])
    gpu = "" if status["gpu"] is None else str(status["gpu"])
    rank_text = f"{status['rank']} of {status['size']}"
    return [
        rank_text,
        status["host"],
        str(status["pid"]),
        gpu,
        str(status["local_rank"]),
        str(status["world"]),
        sets,
        waits,
    ]
