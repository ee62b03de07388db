"""How the gateway is run: flags before environment before file before defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from epic_engine import ConfigError
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from epic_rag.defaults import AUTO

__all__ = ["ENVIRONMENT", "ServerSettings", "load_settings"]

ENVIRONMENT = "EPIC_RAG_SERVE_"
"""What the names of environment variables begin with, such as ``EPIC_RAG_SERVE_PORT``."""

_MODEL = "EPIC_RAG_MODEL"
"""The model of all commands; ``EPIC_RAG_SERVE_MODEL`` goes before it."""

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


class ServerSettings(BaseSettings):
    """Settings of one gateway; made by :func:`load_settings`."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT, extra="forbid", frozen=True)

    store: Path = Field(description="Directory of documents and compiled chunks.")
    model: str = Field(default="smollm2", description="Folder, hub id, .gguf file or 'smollm2'.")
    model_name: str = Field(default="", description="Name under which clients ask for the model; its own by default.")
    host: str = Field(default="127.0.0.1", description="Address to listen at; 0.0.0.0 for all.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen at; 0 takes a free one.")
    api_key_file: Path | None = Field(default=None, description="TOML file of keys; without it nobody is asked.")
    namespace: str = Field(
        default="default", min_length=1, max_length=200, description="Namespace where there are no keys."
    )
    policy: str = Field(default=AUTO, description="Link policy of requests that name none.")
    context: str = Field(default=AUTO, description="Compile context.")
    device: str = Field(default="auto", description="auto, cpu or cuda.")
    dtype: str = Field(default="auto", description="auto, float32, bfloat16 or float16.")
    kv_dtype: str = Field(default="auto", description="What chunks are kept as: auto, bf16, int8 or fp8.")
    memory: str | None = Field(default=None, description="Budget for KV in memory, such as 8GiB.")
    max_model_len: int | None = Field(default=None, ge=2, description="Longest prompt plus answer in tokens.")
    max_tokens: _Count = Field(default=512, description="Longest answer of requests that name no limit.")
    max_answers: _Count = Field(default=16, description="Most answers to one request (n).")
    max_body_bytes: _Count = Field(default=32 << 20, description="Longest request body.")
    max_concurrent: _Count = Field(default=128, description="Most requests that run or wait at once.")
    request_seconds: _Seconds = Field(default=600.0, description="Longest that an answer may take.")
    body_seconds: _Seconds = Field(default=30.0, description="Longest pause of a client that sends its request.")
    write_seconds: _Seconds = Field(default=30.0, description="Longest pause of a client that reads its answer.")
    drain_seconds: _Seconds = Field(default=30.0, description="Longest wait for running answers at shutdown.")
    requests_per_minute: int | None = Field(default=None, ge=1, description="Most requests of a key without a limit.")
    tokens_per_minute: int | None = Field(default=None, ge=1, description="Most tokens of such a key.")
    sweep_seconds: _Seconds = Field(default=30.0, description="How often expired chunks are looked for.")
    console: bool = Field(default=True, description="Whether the web console is served at /.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error."
    )
    log_texts: bool = Field(default=False, description="Whether prompts and answers are logged.")
    allow_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Origins of web pages that may call it; comma-separated in the environment.",
    )

    @field_validator("allow_origins", mode="before")
    @classmethod
    def _separated(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then the file."""
        assert isinstance(init_settings, InitSettingsSource)
        file = init_settings.init_kwargs.pop("config_file", None)
        sources: tuple[PydanticBaseSettingsSource, ...] = (init_settings, env_settings)
        return sources if file is None else (*sources, TomlConfigSettingsSource(settings_cls, toml_file=file))

    @property
    def shown_model(self) -> str:
        """The name that clients give for the model."""
        return self.model_name or Path(self.model).name


def load_settings(flags: Mapping[str, Any], file: str | os.PathLike[str] | None = None) -> ServerSettings:
    """Settings from flags, the environment and a file, in this order of precedence.

    Parameters
    ----------
    flags
        What was given on the command line; None is what was not.
    file
        TOML file with the settings' names.

    Raises
    ------
    ConfigError
        If the file cannot be read, or a setting is unknown or cannot be used; all of them are named.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    environment = {name.upper() for name in os.environ}
    settings = {f"{ENVIRONMENT}{name}".upper() for name in ServerSettings.model_fields}
    unknown = sorted(name for name in environment - settings if name.startswith(ENVIRONMENT))
    if unknown:
        raise ConfigError(f"there is no setting of the gateway for the environment's {', '.join(unknown)}: unset it.")
    if f"{ENVIRONMENT}MODEL" not in environment and os.environ.get(_MODEL):
        given.setdefault("model", os.environ[_MODEL])
    if file is not None:
        if not Path(file).is_file():
            raise ConfigError(f"the configuration {os.fspath(file)!r} is no file: check the path.")
        given["config_file"] = Path(file)
    try:
        return ServerSettings(**given)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(
            f"the gateway's settings cannot be used: {problems}. They are flags, variables that begin with "
            f"{ENVIRONMENT}, and names in the configuration."
        ) from None
    except OSError as error:
        raise ConfigError(f"the configuration {file} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # TOML
        raise ConfigError(f"the configuration {file} is no TOML: {error}.") from error
