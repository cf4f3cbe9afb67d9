"""Import a snapshot as a module, to use its parts; needs torch."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_snapshot(script: Path) -> ModuleType:
    """The train_gpt.py at `script` as a module; loaded once per path.

    Importing a snapshot has no side effects. Raises OSError if there is no such file, and whatever
    the script raises while it is imported.
    """
    name = f"snapshot {Path(script).resolve()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, script)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
