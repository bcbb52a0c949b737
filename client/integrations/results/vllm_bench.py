"""A vLLM engine to be measured: tests/engines/vllm_engine.py, that also goes step by step, and without a model. For vllm_speed.py;
runs in the environment that has vLLM."""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/engines"))
import vllm_engine


class Bench(vllm_engine.Engine):
    def __init__(self, model, pool=None, without_model=False, **more):
        super().__init__(model, pool, **more)
        self.engine, self.asked, self.scheduling = self.llm.llm_engine, 0, 0.0
        core = self.engine.engine_core.engine_core
        if without_model:
            core.model_executor.driver_worker.worker.execute_model = self._guess
        for name in ("add_request", "schedule", "update_from_output"):
            setattr(self.scheduler, name, self._timed(getattr(self.scheduler, name)))

    def _timed(self, call):
        def timed(*arguments, **more):
            began = time.perf_counter()
            try:
                return call(*arguments, **more)
            finally:
                self.scheduling += time.perf_counter() - began
        return timed

    def _guess(self, scheduled):
        """A step of a model that takes no time."""
        from vllm.v1.outputs import ModelRunnerOutput
        names = list(scheduled.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        return ModelRunnerOutput(req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=[
            [7] if request.num_computed_tokens >= request.num_tokens else [] for request in requests])

    def _add(self, prompt, tokens, salt=None):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        self.asked += 1
        salted = {} if salt is None else {"cache_salt": salt}
        self.engine.add_request(str(self.asked), {"prompt_token_ids": prompt, **salted}, SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA))

    def begin(self, prompts, tokens, salt=None):
        for prompt in prompts:
            self._add(prompt, tokens, salt)
        return {}

    def step(self, count):
        """Seconds of so many steps, by the clock and by the processor, tokens made, and whether requests are left."""
        wall, cpu, made = time.perf_counter(), time.process_time(), 0
        for _ in range(count):
            made += sum(len(one.token_ids) for output in self.engine.step() for one in output.outputs)
            if not self.engine.has_unfinished_requests():
                break
        return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "tokens": made,
                "left": self.engine.has_unfinished_requests()}

    def stream(self, prompts, tokens, at_once):
        """Serves all, so many at once. Seconds in the scheduler, and of the processor."""
        began, cpu, waiting, steps, cached = self.scheduling, time.process_time(), list(reversed(prompts)), 0, 0
        live = 0
        while waiting or live:
            while waiting and live < at_once:
                self._add(waiting.pop(), tokens)
                live += 1
            for output in self.engine.step():
                if output.finished:
                    live -= 1
                    cached += output.num_cached_tokens or 0
            steps += 1
        return {"scheduling": self.scheduling - began, "cpu": time.process_time() - cpu, "steps": steps, "cached": cached}

    def first_token(self, prompt):
        began = time.monotonic()
        said = self.generate([prompt], tokens=1)
        return {"seconds": time.monotonic() - began, "had": said["cached"][0]}

    def held(self):
        """Bytes of the blocks that its requests have."""
        blocks = self.scheduler.kv_cache_manager.block_pool
        config = self.scheduler.kv_cache_config
        (tensor,) = config.kv_cache_tensors
        if (pool := getattr(self.scheduler, "pool", None)) is not None:
            return {"blocks": pool._in_use, "block_bytes": tensor.block_stride}
        return {"blocks": config.num_blocks - 1 - blocks.get_num_free_blocks(), "block_bytes": tensor.size // config.num_blocks}


if __name__ == "__main__":
    sys.exit(vllm_engine.main(Bench))
