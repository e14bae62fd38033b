"""Write `docs/images/demo.svg`: what `make demo` shows. `make recording` runs the demo for it, a minute or two."""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from cli.processes import child_environment, shardq_argv

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"
#: as wide as the tables are made for
COLUMNS = 80
#: seconds after which a demo that has not ended never will
PATIENCE_S = 600.0


def transcript() -> str:
    """Run the demo; everything it writes, with its colours, as a terminal would show it."""
    environment = {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1", "SHARDQ_CONFIG": "/dev/null"}
    with tempfile.TemporaryDirectory() as directory:
        result = subprocess.run(
            shardq_argv("--data-dir", directory, "demo"),
            env=child_environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=PATIENCE_S,
            check=True,
        )
    return result.stdout.replace(directory, "~/.local/share/shardq")


def picture(text: str) -> str:
    """A terminal with this text as SVG, which fetches nothing."""
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, force_terminal=True, color_system="truecolor")
    console.print(Text("$ ", style="green") + Text("make demo", style="bold"))
    for line in text.splitlines():
        console.print(Text.from_ansi(line))
    svg = console.export_svg(title="shardq", unique_id="demo")
    return re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)


def main() -> None:
    """Run the demo and write the picture."""
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(transcript()), encoding="utf-8")
    click.echo(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
