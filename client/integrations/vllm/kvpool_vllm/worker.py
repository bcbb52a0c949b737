"""A worker's part in the engine's session: it maps the pool, ends its warm-up, and says which steps are done.

An executor has its worker in the engine core's process, whose session it uses, or workers in processes of their own (vLLM's servers
on CPUs, tensor parallelism), each of which joins that session as a rank.
"""


def extend(wrapper):
    """WorkerWrapperBase, through which executors call their workers."""
    if getattr(wrapper.execute_model, "kvpool", False):
        return
    initialize, execute = wrapper.initialize_from_config, wrapper.execute_model

    def initialize_from_config(self, kv_cache_configs):
        self.kvpool = getattr(kv_cache_configs[self.global_rank], "kvpool", None)
        if self.kvpool is not None:
            self.kvpool.join(self.global_rank)
        return initialize(self, kv_cache_configs)

    def compile_or_warm_up_model(self, *arguments, **more):
        done = self.worker.compile_or_warm_up_model(*arguments, **more)
        if self.kvpool is not None:
            self.kvpool.session.finish_warmup()
        return done

    def execute_model(self, scheduler_output, *arguments, **more):
        output = execute(self, scheduler_output, *arguments, **more)
        if self.kvpool is not None and getattr(scheduler_output, "kvpool_step", 0):
            self.kvpool.computed(scheduler_output.kvpool_step)
        return output

    execute_model.kvpool = True
    wrapper.kvpool = None
    wrapper.initialize_from_config, wrapper.execute_model = initialize_from_config, execute_model
    wrapper.compile_or_warm_up_model = compile_or_warm_up_model
