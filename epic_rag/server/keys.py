"""API keys: who may ask, and in which namespace."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from epic_engine import ConfigError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

__all__ = ["ApiKey", "KeyRing"]

logger = logging.getLogger(__name__)

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# What a header can carry without any question of encoding.
_Key = Annotated[str, Field(min_length=16, pattern=r"^[!-~]+$")]


class ApiKey(BaseModel):
    """A key and what it opens; the key itself is not kept.

    Attributes
    ----------
    name
        For logs.
    namespace
        What it sees and adds to.
    sha256
        Of the key, in hex.
    requests_per_minute, tokens_per_minute
        Limits; None takes the gateway's.
    metrics
        Whether it may read ``/metrics``, which tell of all namespaces.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=200)
    namespace: str = Field(default="default", min_length=1, max_length=200)
    sha256: _Digest
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    metrics: bool = False


class _Entry(BaseModel):
    """A key as it stands in the file: in clear, or as its digest."""

    model_config = ConfigDict(extra="allow")

    key: _Key | None = None
    sha256: _Digest | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        return self

    def made(self) -> ApiKey:
        digest = self.sha256 or _digest(self.key or "")
        return ApiKey(sha256=digest, **(self.model_extra or {}))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing:
    """All keys of a gateway.

    Parameters
    ----------
    keys
        None: everybody may ask, as ``anonymous``.
    anonymous
        Who asks where there are no keys.
    """

    def __init__(self, keys: Sequence[ApiKey] | None, anonymous: ApiKey) -> None:
        self._keys = None if keys is None else tuple(keys)
        self._anonymous = anonymous

    @classmethod
    def open(cls, path: Path | None, namespace: str) -> Self:
        """Keys of a file; without one everybody has ``namespace``.

        Parameters
        ----------
        path
            TOML: ``[[keys]]`` with ``name``, ``key`` or ``sha256``, and optionally ``namespace``,
            ``requests_per_minute``, ``tokens_per_minute`` and ``metrics``.
        namespace
            Of requests without a key.

        Raises
        ------
        ConfigError
            If the file cannot be read, or a key in it is malformed or stands there twice.
        """
        anonymous = ApiKey(name="anonymous", namespace=namespace, sha256="0" * 64, metrics=True)
        if path is None:
            return cls(None, anonymous)
        try:
            if os.name != "nt" and stat.S_IMODE(path.stat().st_mode) & 0o077:
                logger.warning("others can read the keys in %s: chmod 600 it", path)
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"the keys in {path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise ConfigError(f"{path} is no TOML: {error}.") from None
        entries = raw.get("keys")
        if not isinstance(entries, list) or not entries or set(raw) - {"keys"}:
            raise ConfigError(f"{path} must hold [[keys]] and nothing else: write one such table for each key.")
        try:
            keys = [_Entry.model_validate(entry).made() for entry in entries]
        except ValidationError as error:
            # Without the values: an error must not show a key.
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'key'}: {e['msg']}" for e in error.errors())
            raise ConfigError(f"a key in {path} cannot be used: {problems}.") from None
        for field in ("name", "sha256"):
            values = [getattr(key, field) for key in keys]
            if len(set(values)) < len(values):
                raise ConfigError(f"two keys in {path} have the same {'name' if field == 'name' else 'key'}.")
        return cls(keys, anonymous)

    @property
    def required(self) -> bool:
        """Whether a key must be given."""
        return self._keys is not None

    @property
    def namespaces(self) -> set[str]:
        """Every namespace that some key opens."""
        return {key.namespace for key in self._keys or (self._anonymous,)}

    def find(self, authorization: str | None) -> ApiKey | None:
        """The key of an ``Authorization`` header; None if it is none of these.

        Takes as long for a wrong key as for a right one.
        """
        if self._keys is None:
            return self._anonymous
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip())
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found if scheme.lower() == "bearer" else None
