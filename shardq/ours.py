"""That our packages, whose names are plain, are found before others of the same names."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

#: beside this package
PACKAGES = ("cli", "relay", "storage", "tasks", "workers")


def come_first() -> None:
    """Import our packages from where this one lies, whatever `PYTHONPATH` or the working folder holds.

    Raises ImportError if another package was imported under such a name before.
    """
    root = Path(__file__).parent.parent
    for name in PACKAGES:
        place = root / name / "__init__.py"
        loaded = sys.modules.get(name)
        if loaded is None:
            _load(name, place)
        elif loaded.__file__ is None or Path(loaded.__file__).resolve() != place.resolve():
            raise ImportError(
                f"{loaded.__file__ or name} was imported as {name!r}, which shardq needs for its own {place.parent}: "
                "import shardq first, or in an environment of its own"
            )


def _load(name: str, place: Path) -> None:
    spec = spec_from_file_location(name, place, submodule_search_locations=[str(place.parent)])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
