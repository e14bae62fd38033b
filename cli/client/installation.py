"""Which database and which queue server: found as the command line finds them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cli.client.transport import Transport

if TYPE_CHECKING:
    from cli.settings import CliSettings


def local(
    data_dir: str | Path | None = None, *, database_url: str | None = None, broker_url: str | None = None
) -> Transport:
    """The installation of this machine, open.

    What is named here goes before this process' variables (`SHARDQ_DATABASE_URL`, …), those go before the
    configuration file, and that before what `shardq up` left in the data directory. Raises ConfigInvalid,
    SettingInvalid, Unavailable.
    """
    from cli.client.edge import translated_errors
    from cli.client.local import Local

    named = {"SHARDQ_DATABASE_URL": database_url, "SHARDQ_BROKER_URL": broker_url}
    with translated_errors():
        found = _found(None if data_dir is None else Path(data_dir).expanduser().absolute())
        return Local.open({**found, **{name: value for name, value in named.items() if value is not None}})


def _found(data_dir: Path | None) -> dict[str, str]:
    """What holds before this process' variables, or where they say nothing."""
    from cli import config_file
    from cli.settings import CliSettings, addresses_in

    path = config_file.find()
    written = config_file.read(path).variables(None) if path is not None else {}
    if data_dir is not None:
        return {**_unset(written), **addresses_in(CliSettings(data_dir=data_dir))}
    return {**_unset(addresses_in(_settings(written))), **_unset(written)}


def _settings(written: dict[str, str]) -> CliSettings:
    from cli.settings import CliSettings

    data_dir = _unset(written).get("SHARDQ_DATA_DIR")
    return CliSettings(data_dir=Path(data_dir).expanduser()) if data_dir else CliSettings()


def _unset(variables: dict[str, str]) -> dict[str, str]:
    """Those that this process' environment does not set."""
    return {name: value for name, value in variables.items() if not os.environ.get(name)}
