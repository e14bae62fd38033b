"""Write `docs/settings.md` from the settings classes. `python -m scripts.settings_page` or `make docs`.

The meanings are the `#:` comments above the fields, and for options that no settings class has their help.
"""

from __future__ import annotations

import inspect
import re
import socket
from pathlib import Path

import click
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cli.catalogue import PROCESSES, Setting, settings_of, words
from cli.main import shardq
from cli.settings import CliSettings, default_data_dir
from relay.settings import RelaySettings
from storage.settings import StorageSettings, default_database_url
from tasks.settings import BookkeeperSettings, LogSettings, TaskSettings
from workers.settings import CacheSettings, HeadSettings, TailSettings, WorkerSettings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

#: class that declares a setting → title of its section, in the page's order
TITLES: dict[type, str] = {
    CliSettings: "This machine",
    LogSettings: "This machine",
    CacheSettings: "This machine",
    StorageSettings: "Database",
    TaskSettings: "Queue",
    BookkeeperSettings: "Bookkeeper",
    WorkerSettings: "Head and tail",
    HeadSettings: "Head",
    TailSettings: "Tail",
    RelaySettings: "Wire",
}
#: classes that commands which only ask or submit read, too
ASKED = {CliSettings, StorageSettings, TaskSettings}
#: of what is no field of a class
OPTIONS = "Options alone"

#: defaults that depend on the machine
FOUND: dict[object, str] = {
    default_data_dir: "`$XDG_DATA_HOME/shardq`, else `~/.local/share/shardq`",
    default_database_url: "`shardq.sqlite3` in the data directory",
    socket.gethostname: "the host's name",
}

INTRODUCTION = """\
# Settings

<!-- made by `make docs`: change the comments of the settings classes instead -->

Every setting can come from four places; the first that has it wins:

1. an **option** of the command,
2. an **environment variable**: `SHARDQ_` and the key in capitals,
3. the **configuration file**, which only `shardq` itself reads (`celery -A tasks.app` does not),
4. the **default**.

`shardq config` shows what holds and where it comes from, `shardq config head` the same for a head. What
[parameters](parameters.md) a job has is not a setting but part of its line.

## The configuration file

TOML, at `$XDG_CONFIG_HOME/shardq/config.toml` (else `~/.config/shardq/config.toml`), or wherever `shardq --config FILE`
or `SHARDQ_CONFIG` says; `SHARDQ_CONFIG=/dev/null` is none. A file in the current folder is not looked for, so that
nobody runs with the settings of a folder by accident.

```toml
broker_url = "rediss://shardq-client:PASSWORD@queue.example.org:6379/0"
tls_ca = "/etc/shardq/ca.crt"
model = "Qwen/Qwen2.5-7B-Instruct"
dtype = "float16"
device = "cuda"

[head]
drafter = "model"
drafter_model = "Qwen/Qwen2.5-0.5B-Instruct"
slots = 32

[tail]
slots = 64
```

Keys are those of the tables below. What stands in the table of a command (TABLES) wins over what stands outside
of it, for that command. `shardq up` starts head, tail and bookkeeper, each of which reads its own table; `shardq demo`
reads none. A key that does not exist, a value of another type and a file that cannot be read are errors that name file
and key. An address with a password is refused in a file that others may read: `chmod 600` it.
"""

OTHERS = """\
## Other variables

| variable | meaning |
|---|---|
| `SHARDQ_CONFIG` | The configuration file; `--config` wins. |
| `SHARDQ_DEBUG` | `1` adds the traceback of an unexpected error. |
| `NO_COLOR` | Anything: no colours. |
| `XDG_DATA_HOME`, `XDG_CONFIG_HOME`, `XDG_CACHE_HOME` | Where data, configuration and cache are by default. |
"""


def page() -> str:
    """The whole page."""
    tables = ", ".join(f"`[{name}]`" for name in PROCESSES)
    rows = _rows()
    sections = [_section(title, rows[title]) for title in dict.fromkeys((*TITLES.values(), OPTIONS)) if title in rows]
    return "\n".join([INTRODUCTION.replace("TABLES", tables), *sections, OTHERS])


def _section(title: str, rows: list[str]) -> str:
    head = "| key and variable | option | read by | values | default | meaning |\n|---|---|---|---|---|---|"
    return "\n".join([f"## {title}\n", head, *rows, ""])


def _rows() -> dict[str, list[str]]:
    """Rows by title. A key with another default elsewhere has a row for each."""
    readers: dict[tuple[str, str], list[tuple[str, Setting]]] = {}
    for process in PROCESSES:
        for setting in settings_of(process).values():
            readers.setdefault((setting.key, _default(setting)), []).append((process, setting))
    rows: dict[str, list[str]] = {}
    for found in readers.values():
        settings = sorted((setting for _, setting in found), key=lambda setting: not _meaning(setting))
        title = TITLES[_declaring(settings[0])] if settings[0].owner else OPTIONS
        rows.setdefault(title, []).append(_row(settings[0], [process for process, _ in found]))
    return rows


def _row(setting: Setting, processes: list[str]) -> str:
    values = words(setting.kind).replace('"', "`")
    if setting.owner and _declaring(setting) in ASKED:
        processes = [*processes, "other commands"]
    names = f"`{setting.key}`<br>`{setting.variable}`"
    cells = [names, _flags(setting.key, processes), ", ".join(processes), values, _default(setting)]
    return f"| {' | '.join([*cells, _meaning(setting)])} |"


def _default(setting: Setting) -> str:
    factory = setting.declared.default_factory if isinstance(setting.declared, FieldInfo) else None
    if factory in FOUND:
        return FOUND[factory]
    if setting.default is PydanticUndefined:
        return "must be given"
    if setting.default is None:
        return "–"
    return f"`{str(setting.default).lower() if isinstance(setting.default, bool) else setting.default}`"


def _flags(key: str, processes: list[str]) -> str:
    """The options that give a setting to one of these processes, or to every command."""
    commands = [shardq, *filter(None, (shardq.get_command(click.Context(shardq), name) for name in processes))]
    flags = {
        f"`{flag}`": None
        for command in commands
        for option in command.params
        if isinstance(option, click.Option) and (option.name == key or option.envvar == f"SHARDQ_{key.upper()}")
        for flag in (*option.opts, *option.secondary_opts)
    }
    return ", ".join(flags) or "–"


def _declaring(setting: Setting) -> type:
    """The class in whose body the field stands."""
    assert setting.owner is not None
    return next(kind for kind in setting.owner.__mro__ if _name(setting) in vars(kind).get("__annotations__", {}))


def _name(setting: Setting) -> str:
    assert setting.owner is not None
    return next(name for name, declared in setting.owner.model_fields.items() if declared is setting.declared)


def _meaning(setting: Setting) -> str:
    """The comment above a field, or the help of an option; empty if there is none."""
    if isinstance(setting.declared, click.Option):
        return (setting.declared.help or "").partition("  [env")[0]
    lines = inspect.getsource(_declaring(setting)).splitlines()
    place = next(n for n, line in enumerate(lines) if line.strip().startswith(f"{_name(setting)}:"))
    comment: list[str] = []
    for line in reversed(lines[:place]):
        if not line.strip().startswith("#:"):
            break
        comment.insert(0, line.strip().removeprefix("#:").strip())
    text = re.sub(r"\bNone\b", "unset", " ".join(comment)).replace("|", "\\|")
    return f"{text[:1].upper()}{text[1:]}{'.' if text else ''}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    click.echo(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
