# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Writes what a wheel says about the crates that are linked into it: their licences and a bill of
materials.

Usage: `python release/licenses.py TREE`. Writes `LICENSE-THIRD-PARTY.txt` and `farandole.cdx.json`
(CycloneDX 1.5) into the tree. Both depend on `Cargo.lock` and the target alone, so that two builds
give the same bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

LINKED = ("farandole-python", "farandole-tensorflow")
"""The crates whose libraries are files of the wheel."""
PAGE_LOCK = "crates/ui/page/package-lock.json"
"""Packages of npm in the page of the run viewer, whose files contain the licences."""
TEXTS = re.compile(r"(?i)^(licen[cs]e|copying|copyright|notice|unlicense)")


def linked(tree: Path, target: str) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Packages that are linked, by id, and which of them each uses.

    Procedural macros and build scripts run in the compiler, so they and what only they use are left
    out.
    """
    command = [
        "cargo",
        "metadata",
        "--format-version",
        "1",
        "--locked",
        "--filter-platform",
        target,
    ]
    output = subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout
    metadata = json.loads(output)
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    queue = [key for key, package in packages.items() if package["name"] in LINKED]
    uses: dict[str, list[str]] = {}
    while queue:
        key = queue.pop()
        if key in uses:
            continue
        uses[key] = [
            dependency["pkg"]
            for dependency in nodes[key]["deps"]
            if any(kind["kind"] is None for kind in dependency["dep_kinds"])
            and not any(
                "proc-macro" in made["kind"] for made in packages[dependency["pkg"]]["targets"]
            )
        ]
        queue += uses[key]
    return {key: packages[key] for key in uses}, uses


def texts(package: dict[str, Any]) -> dict[str, str]:
    """Returns the licence files of a package, those of C sources inside of it included."""
    home = Path(package["manifest_path"]).parent
    found = sorted(file for file in home.rglob("*") if file.is_file() and TEXTS.match(file.name))
    return {
        str(file.relative_to(home)): file.read_text(errors="replace").strip()
        for file in found
        if file.suffix.lower() in {"", ".txt", ".md", ".mit", ".apache"} or "-" in file.name
    }


def notices(packages: dict[str, Any]) -> str:
    """Returns the text of `LICENSE-THIRD-PARTY.txt`: all crates, then each licence text once,
    with its crates.
    """
    lines = [
        (
            "Crates that are linked into the libraries of this wheel, with the licences that "
            "their authors offer."
        ),
        "",
    ]
    lines += ["The standard library of Rust is linked as well: MIT OR Apache-2.0.", ""]
    owners: dict[str, list[str]] = defaultdict(list)
    for package in sorted(packages.values(), key=lambda one: (one["name"], one["version"])):
        if not package["license"]:
            raise RuntimeError(
                f"crate without a licence expression: {package['name']} {package['version']}"
            )
        label = f"{package['name']} {package['version']}"
        found = texts(package)
        note = "" if found else " (the crate contains no licence file)"
        lines.append(f"{label}: {package['license']}{note}")
        for text in found.values():
            owners[text].append(label)
    for text, labels in sorted(owners.items(), key=lambda item: item[1]):
        lines += ["", "=" * 80, ", ".join(dict.fromkeys(labels)), "-" * 80, text]
    return "\n".join(lines) + "\n"


def bill(
    packages: dict[str, Any], uses: dict[str, list[str]], tree: Path, version: str
) -> dict[str, Any]:
    """Returns a CycloneDX document: each crate with version, licence and the checksum of
    `Cargo.lock`.
    """
    lock = tomllib.loads((tree / "Cargo.lock").read_text())
    sums = {(one["name"], one["version"]): one.get("checksum") for one in lock["package"]}
    purls = {
        key: f"pkg:cargo/{package['name']}@{package['version']}"
        for key, package in packages.items()
    }
    components = []
    for key, package in sorted(packages.items(), key=lambda item: purls[item[0]]):
        checksum = sums.get((package["name"], package["version"]))
        components.append(
            {
                "type": "library",
                "bom-ref": purls[key],
                "name": package["name"],
                "version": package["version"],
                "purl": purls[key],
                "licenses": [{"expression": package["license"].replace("/", " OR ")}],
                **({"hashes": [{"alg": "SHA-256", "content": checksum}]} if checksum else {}),
            }
        )
    for name, package in json.loads((tree / PAGE_LOCK).read_text())["packages"].items():
        if name:  # the first entry is ours
            name = name.rpartition("node_modules/")[2]  # noqa: PLW2901 - its path until here
            purl = f"pkg:npm/{name}@{package['version']}"
            licence = [{"expression": package["license"]}]
            components.append(
                {"type": "library", "bom-ref": purl, "name": name, "version": package["version"]}
            )
            components[-1] |= {"purl": purl, "licenses": licence}
    wheel = f"pkg:pypi/farandole@{version}"
    roots = sorted(purls[key] for key, package in packages.items() if package["name"] in LINKED)
    edges = [
        {"ref": purls[key], "dependsOn": sorted(purls[used] for used in used_by)}
        for key, used_by in uses.items()
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": wheel,
                "name": "farandole",
                "version": version,
                "purl": wheel,
            }
        },
        "components": components,
        "dependencies": [
            {"ref": wheel, "dependsOn": roots},
            *sorted(edges, key=lambda edge: edge["ref"]),
        ],
    }


def write(tree: Path, version: str, target: str) -> int:
    """Writes both files into the tree; how many crates of others are linked."""
    packages, uses = linked(tree, target)
    theirs = {key: package for key, package in packages.items() if package["source"] is not None}
    (tree / "LICENSE-THIRD-PARTY.txt").write_text(notices(theirs))
    document = bill(packages, uses, tree, version)
    (tree / "farandole.cdx.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return len(theirs)


if __name__ == "__main__":
    print(write(Path(sys.argv[1]), "0", "x86_64-unknown-linux-gnu"))  # noqa: T201
