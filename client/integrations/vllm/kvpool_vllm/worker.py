"""A worker's part in the engine's session: it maps the pool, ends its warm-up, and says which steps are done.

An executor has its worker in the engine core's process, whose session it uses, or workers in processes of their own (vLLM's servers
on CPUs, tensor parallelism), each of which joins that session as a rank.
"""

from __future__ import annotations

from typing import Any


def extend(wrapper: Any) -> None:
    """WorkerWrapperBase, through which executors call their workers."""
    if getattr(wrapper.execute_model, "kvpool", False):
        return
    initialize, execute = wrapper.initialize_from_config, wrapper.execute_model

    def initialize_from_config(self: Any, kv_cache_configs: Any) -> Any:
        self.kvpool = getattr(kv_cache_configs[self.global_rank], "kvpool", None)
        if self.kvpool is not None:
            self.kvpool.join(self.global_rank)
        return initialize(self, kv_cache_configs)

    def compile_or_warm_up_model(self: Any, *arguments: Any, **more: Any) -> Any:
        done = self.worker.compile_or_warm_up_model(*arguments, **more)
        if self.kvpool is not None:
            self.kvpool.session.finish_warmup()
        return done

    def execute_model(self: Any, scheduler_output: Any, *arguments: Any, **more: Any) -> Any:
        output = execute(self, scheduler_output, *arguments, **more)
        step = getattr(scheduler_output, "kvpool_step", 0)
        if self.kvpool is not None and step:
            self.kvpool.computed(step)
        return output

    execute_model.kvpool = True  # type: ignore[attr-defined]
    wrapper.kvpool = None
    wrapper.initialize_from_config, wrapper.execute_model = initialize_from_config, execute_model
    wrapper.compile_or_warm_up_model = compile_or_warm_up_model
