# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Temporary credentials of Unity Catalog for the files of a table or volume, and the checks of its
answers.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from farandole.stores.catalog_requests import read_text_field
from farandole.stores.credential_failures import log_first_failure
from farandole.stores.store_options import CREDENTIALS_OPTION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farandole.stores.catalog_requests import CatalogSession

API_PATH: Final = "/api/2.1/unity-catalog"
_METASTORE_PATH: Final = f"{API_PATH}/metastore_summary"
_READ_SCHEMES: Final = ("s3", "s3a", "gs", "abfss")
"""Schemes of locations that are used. A catalog must not choose a file of this host.
`refuse_local_files` says the same of the files of a table.
"""
_MAX_LOCATION_CHARACTERS: Final = 2048
_REGION_OPTIONS: Final = ("region", "region_name", "aws_region", "aws_default_region")
_REGION_VARIABLES: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")
_STATIC_OPTION_PATTERN: Final = re.compile(
    r"((aws|google|azure)_)?(storage_)?(credentials|connection_string|anon|skip_signature|profile"
    r"|key|secret|(session_|bearer_)?token|access_key_id|secret_access_key|role_arn"
    r"|web_identity_token_file|container_credentials_(full|relative)_uri"
    r"|service_account(_path|_key)?|application_credentials"
    r"|(account|access|master)_key|sas_(key|token)|(client|tenant|authority)_id|client_secret"
    r"|federated_token_file|use_azure_cli|authority_host|msi_endpoint|(identity|object)_id)"
)
"""Pattern of the names of options with credentials, or by which credentials are found. Beside a
function of credentials they have no effect, or turn it off.
"""
_REGION_PATTERN: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_MILLISECONDS_PER_SECOND: Final = 1e3
_MAX_EXPIRY_MILLISECONDS: Final = 10**14
"""Year 5138: datetimes end in the year 9999."""
_MAX_SHARED_SECONDS: Final = 60.0
"""Longest time between a request for credentials and their use by another reader."""
_SHARED_LIFE_PART: Final = 0.5
"""Part of their life for which they are given to another reader."""
_CREDENTIAL_FIELDS: Final = {
    "aws_temp_credentials": {
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
    },
    "azure_user_delegation_sas": {"sas_token": "sas_token"},
    "azure_aad": {"token": "aad_token"},
    "gcp_oauth_token": {"token": "oauth_token"},
}
"""Kinds of credentials in an answer: names of a storage option's credentials, and of fields."""


@dataclass
class CredentialGrant:
    """Credentials that a catalog has given out.

    Attributes:
        values: the values of the storage option `credentials`, and their expiry.
        shared_until: monotonic time until which another reader gets them, too.
        is_in_store: whether the native store has them.
    """

    values: dict[str, Any] = field(repr=False)
    shared_until: float
    is_in_store: bool = False


@dataclass(frozen=True)
class VendedCredentials:
    """A function that returns temporary credentials for the files of a table or volume.

    It is sent to the processes that use the files, and contains the token or secret of the session.

    Attributes:
        session: the catalog.
        subject: the table or volume, for messages: `the table main.sales.clicks`.
        path: path of the request.
        body: names and values of the request.
        advice: advice for a request that is refused.
    """

    session: CatalogSession
    subject: str
    path: str
    body: tuple[tuple[str, str], ...]
    advice: str

    def __call__(self) -> dict[str, Any]:
        """Returns credentials that the native store does not have: it calls this again because
        those that it has are old, or were refused.

        Returns:
            The values of the storage option `credentials`, and their expiry in seconds since 1970.

        Raises:
            ValueError: Credentials of a kind that is not known.
            OSError: The catalog refuses the request, or does not answer.
        """
        grant = self._shared_grant()
        if grant is None or grant.is_in_store:
            label = self.session.label_subject(self.subject)
            with log_first_failure(
                f"credentials for {label}", lambda error: str(error).removeprefix(f"{label}: ")
            ):
                grant = self.request_grant()
        grant.is_in_store = True
        return dict(grant.values)

    def present_credentials(self) -> dict[str, Any]:
        """Like a call, for a reader beside the native store, such as a table's client: it gets the
        credentials of the store if these are young.
        """
        grant = self._shared_grant()
        return dict((self.request_grant() if grant is None else grant).values)

    def request_grant(self) -> CredentialGrant:
        """Requests credentials, without a warning about a failure. The native store gets them by
        its next call.
        """
        return self.note_grant(self.request_values())

    def note_grant(self, values: dict[str, Any]) -> CredentialGrant:
        """Takes note of credentials that the catalog has given out.

        Args:
            values: As a call returns them, perhaps without their expiry.
        """
        life = values["expires"] - time.time() if "expires" in values else _MAX_SHARED_SECONDS
        shared_seconds = min(_MAX_SHARED_SECONDS, life * _SHARED_LIFE_PART)
        grant = CredentialGrant(values, time.monotonic() + shared_seconds)
        _NEWEST_GRANTS[self] = grant
        return grant

    def request_values(self) -> dict[str, Any]:
        """Returns new credentials, as a call does.

        Raises:
            ValueError: Credentials of a kind that is not known.
            OSError: The catalog refuses the request, or does not answer.
        """
        label = self.session.label_subject(self.subject)
        found = self.session.request_json(self.path, dict(self.body), label, self.advice)
        kind = next(
            (kind for kind in _CREDENTIAL_FIELDS if isinstance(found.get(kind), dict)), None
        )
        if kind is None:
            raise ValueError(f"{label} has no credentials of a kind that is known")
        values: dict[str, Any] = {
            name: read_text_field(found[kind], field_name, label)
            for name, field_name in _CREDENTIAL_FIELDS[kind].items()
        }
        expires = found.get("expiration_time")
        is_whole = isinstance(expires, int) and not isinstance(expires, bool)
        if expires is None or not is_whole or not 0 < expires < _MAX_EXPIRY_MILLISECONDS:
            raise ValueError(f"{label} has credentials without the time of their expiry")
        return {**values, "expires": expires / _MILLISECONDS_PER_SECOND}

    def _shared_grant(self) -> CredentialGrant | None:
        grant = _NEWEST_GRANTS.get(self)
        return grant if grant is not None and time.monotonic() < grant.shared_until else None


_NEWEST_GRANTS: Final[dict[VendedCredentials, CredentialGrant]] = {}
"""The newest credentials of this process for each table or volume. There is no lock, which a fork
would leave taken in the child: threads may request some twice.
"""


def vended_storage_options(
    credentials: VendedCredentials, location: str, given: dict[str, Any]
) -> dict[str, Any]:
    """Returns the options by which the native store uses the files of a table or volume.

    Args:
        credentials: Their credentials.
        location: URL of their directory.
        given: Options of the user, such as an endpoint or a region.

    Raises:
        TypeError: The user gives credentials.
    """
    refuse_static_credentials(credentials.subject, given)
    options: dict[str, Any] = {CREDENTIALS_OPTION: credentials}
    is_known = any(name in given for name in _REGION_OPTIONS) or any(
        os.environ.get(name) for name in _REGION_VARIABLES
    )
    if location.startswith("s3") and not is_known:
        region = _metastore_region(credentials.session)
        options |= {} if region is None else {"region": region}
    return {**options, **given}


def refuse_static_credentials(subject: str, given: Mapping[str, Any]) -> None:
    """Refuses options with credentials, or by which credentials are found.

    Args:
        subject: The table or volume, for messages.
        given: Options of the user; nested ones, as fsspec's `client_kwargs`, too.

    Raises:
        TypeError: There is such an option; the message has its name.
    """
    for name, value in given.items():
        if isinstance(value, dict):
            refuse_static_credentials(subject, value)
        elif value not in (None, False) and _STATIC_OPTION_PATTERN.fullmatch(name.lower()):
            raise TypeError(
                f"the storage option {name!r} cannot be given for {subject}: the catalog gives "
                "out its credentials"
            )


def _metastore_region(session: CatalogSession) -> str | None:
    """Returns the region of the catalog, in which its buckets usually are."""
    try:
        found = session.request_json(_METASTORE_PATH, None, "the metastore", "")
    except (OSError, ValueError):  # a permission that reading does not need
        return None
    region = found.get("region")
    is_region = isinstance(region, str) and _REGION_PATTERN.fullmatch(region) is not None
    return region if is_region else None


def check_location(location: str, label: str) -> str:
    """Returns the location of a table or volume without a slash at its end.

    Args:
        location: URL in an answer of a catalog.
        label: Description of the table or volume, for messages.

    Raises:
        ValueError: It is no URL of a service that is used.
    """
    parts = urlsplit(location)
    is_plain = (
        location.isprintable()
        and len(location) <= _MAX_LOCATION_CHARACTERS
        and not any(character in location for character in "?#*[")
        and "//" not in parts.path
        and ".." not in parts.path.split("/")
    )
    has_key = bool(parts.path.strip("/"))
    if not is_plain or parts.scheme not in _READ_SCHEMES or not parts.netloc or not has_key:
        raise ValueError(
            f"{label} is at a location that is not read: {shorten_value(location)}. Locations with "
            f"one of {', '.join(f'{scheme}://' for scheme in _READ_SCHEMES)} are"
        )
    return location.rstrip("/")


def shorten_value(value: Any) -> str:
    """Returns the text of a value from a catalog, for messages.

    Args:
        value: Anything.
    """
    return repr(value)[:200]
