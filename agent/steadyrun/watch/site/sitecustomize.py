"""The way in: the launcher puts this folder in front of PYTHONPATH, and Python imports this module before the script.

It takes itself out of ``sys.path`` and of the environment, hands over to ``steadyrun.watch.bootstrap``, and then
imports the ``sitecustomize`` that it has displaced. Nothing here may keep the script from running.
"""

import os
import sys


def _enter() -> None:
    modules = frozenset(sys.modules)
    here = os.path.dirname(__file__)
    raw_env = dict(os.environ)
    setup = os.environ.pop("STEADYRUN_SETUP", None)
    standby = os.environ.pop("STEADYRUN_STANDBY", None)
    original = os.environ.pop("STEADYRUN_PYTHONPATH", None)
    if setup is None and standby is None and original is None:
        original = os.pathsep.join(p for p in raw_env.get("PYTHONPATH", "").split(os.pathsep) if p != here) or None
    if original is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original
    if here in sys.path:
        sys.path.remove(here)
    sys.path_importer_cache.pop(here, None)
    if setup is None and standby is None:
        return
    cached = frozenset(sys.path_importer_cache)
    # steadyrun may not be installed for this interpreter: the source root that holds this very file is put on the path
    # for the moment of the import (.../steadyrun/watch/site/ lies three levels below it, in a checkout and in a wheel).
    root = here
    for _ in range(3):
        root = os.path.dirname(root)
    sys.path.insert(0, root)
    try:
        from steadyrun.watch import bootstrap
    finally:
        sys.path.remove(root)
        for path in [p for p in sys.path_importer_cache if p not in cached]:
            del sys.path_importer_cache[path]
    bootstrap.begin(setup, standby, raw_env, modules)


try:
    _enter()
except Exception as e:
    sys.stderr.write(f"steadyrun: this rank runs unwatched: {type(e).__name__}: {e}\n")
finally:
    sys.modules.pop(__name__, None)

# Displaced by this one; if there is none, the ImportError is what `site` would have met without us, and it is silent.
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
