"""SGLang for `rollout.engine: lying_engine:LyingEngine`: its weight loader does what `broken_loader` reads."""

import broken_loader
from rlinf_workers.engines.sglang import engine as engine_module

engine_module.LOADER = broken_loader.LOADER


class LyingEngine(engine_module.SGLangEngine):
    pass
