"""A vLLM engine as a process of its own, for vllm_test.py: one JSON object a line in, one out. Runs in the environment that has vLLM.

argv[1]: {"model": directory, "pool": additional_config.kvpool or null, "connector": kv_connector_extra_config or null, "processes": its
core and worker in processes of their own, other arguments of vllm.LLM}.
"""

import json
import os
import signal
import sys
import threading
import time
import types

from kvpool.conform import adapter


def _lives(session):
    import kvpool
    try:
        session.check()
    except kvpool.KvpoolError:
        return False
    return True


class Slow:
    """The answer of a tier that takes for ever, or until the session is over, to who waits for something that is there. What comes is held,
    and nobody has it."""

    def __init__(self, session, wait):
        self.session, self.wait_of, self.pending, self.hit = session, wait, wait.pending, None

    def wait(self, timeout):
        import kvpool
        self.session.check()
        if self.hit is None:
            self.hit = self.pending.wait(timeout)
        if self.wait_of.is_below:
            raise kvpool.DeadlineExceededError("it has not come")
        return self.hit


class Engine:
    def __init__(self, model, pool=None, connector=None, transfer=None, processes=False, **more):
        """transfer: other fields of kv_transfer_config."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if processes else "0"
        from vllm import LLM
        if connector is not None:
            more["kv_transfer_config"] = {"kv_connector": "KvPoolConnector",
                                          "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                                          "kv_connector_extra_config": connector, **(transfer or {})}
        if pool is not None:
            more |= {"scheduler_cls": "kvpool_vllm.Scheduler", "additional_config": {"kvpool": pool}}
        self.llm = LLM(**{"model": model, "skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "block_size": 32,
                          "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20, "max_num_batched_tokens": 2048,
                          "max_num_seqs": 16, **more})
        self.preemptions, self.steps, self.at_step, self.refused = 0, 0, {}, 0
        if processes:
            return
        # A signal to this process is one to all of the engine, and all of it can be reached.
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        preempt, update = self.scheduler._preempt_request, self.scheduler.update_from_output

        def counted(*arguments, **keywords):
            self.preemptions += 1
            return preempt(*arguments, **keywords)

        def stepped(*arguments, **keywords):
            self.steps += 1
            if self.steps in self.at_step:
                self.at_step.pop(self.steps)()
            return update(*arguments, **keywords)

        self.scheduler._preempt_request, self.scheduler.update_from_output = counted, stepped

    def generate(self, prompts, tokens=20, salt=None, shared=None, lora=None, kill=None, stop=None, weights=None, adapters=()):
        """salt, shared: cache_salt, and how many tokens are in front of what it parts.
        At a step from now, of how many the last says: kill: [process, step]; stop: the same, and it goes on when the generation is over;
        weights: [directory, way, step], as change_weights; adapters: [[directory, step]], which are loaded in place.
        lora: [name, directory], and whether vLLM loads it in place with each step of these requests."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        if kill is not None:
            self.at_step[self.steps + kill[1]] = lambda: os.kill(kill[0], signal.SIGKILL)
        if stop is not None:
            self.at_step[self.steps + stop[1]] = lambda: os.kill(stop[0], signal.SIGSTOP)
        if weights is not None:
            self.at_step[self.steps + weights[2]] = lambda: self.change_weights(*weights[:2])
        for directory, step in adapters:
            self.at_step[self.steps + step] = lambda directory=directory: self.load_in_place(directory)
        salted = {} if salt is None else {"cache_salt": salt}
        arguments = None if shared is None else {"kvpool_shared_prefix_tokens": shared}
        try:
            outputs = self.llm.generate([{"prompt_token_ids": prompt, **salted} for prompt in prompts],
                                        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False,
                                                       extra_args=arguments), use_tqdm=False,
                                        lora_request=LoRARequest(lora[0], 1, lora[1], load_inplace=len(lora) > 2 and lora[2]) if lora else None)
        finally:
            if stop is not None:
                os.kill(stop[0], signal.SIGCONT)
        return {"tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs]}

    def change_weights(self, directory, way):
        """To those of another directory of the same model, as a loop of reinforcement learning does it."""
        from safetensors.torch import load_file
        if way == "reload_weights":
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
        elif way == "a function":
            self.llm.collective_rpc(lambda worker: worker.model_runner.reload_weights(weights_path=directory))
        else:  # Of the embedding: most other weights are packed for the CPU's kernels once they are loaded.
            name = "model.embed_tokens.weight"
            model = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()
            model.load_weights([(name, load_file(f"{directory}/model.safetensors")[name])])
        return {}

    def change_weights_before(self, prompts, directory, way, tokens=20):
        """Answers to requests that are there, but not yet the scheduler's, when the weights change."""
        from vllm import SamplingParams
        engine, core = self.llm.llm_engine, self.llm.llm_engine.engine_core.engine_core
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        made = [core.preprocess_add_request(engine.input_processor.process_inputs(
            str(i), {"prompt_token_ids": prompt}, params, supported_tasks=("generate",))) for i, prompt in enumerate(prompts)]
        self.change_weights(directory, way)
        for request in made:
            core.add_request(*request)
        said = {}
        while core.scheduler.has_unfinished_requests():
            for outputs in (core.step_fn()[0] or {}).values():
                for output in outputs.outputs:
                    said.setdefault(output.request_id, []).extend(output.new_token_ids)
        return {"tokens": [said[str(i)] for i in range(len(prompts))]}

    def version(self):
        import vllm
        return {"version": [int(part) for part in vllm.__version__.split(".")[:2]]}

    def touched(self):
        """What of vLLM's is not its own."""
        found = set()
        for module in [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "vllm"]:
            for name, value in list(vars(module).items()):
                if isinstance(value, types.FunctionType) and vars(value).get("kvpool", False):
                    found.add(f"{module.__name__}.{name}")
                elif isinstance(value, type):
                    found.update(f"{value.__name__}.{method}" for method, function in list(vars(value).items())
                                 if isinstance(function, types.FunctionType) and vars(function).get("kvpool", False))
        # A module that imports vLLM's function by name has it there, too.
        return {"names": sorted(name for name in found if not name.endswith(".load_general_plugins") or name.startswith("vllm.plugins."))}

    def load_in_place(self, directory):
        """An adapter, of whatever name."""
        from vllm.lora.request import LoRARequest
        return {"done": self.llm.llm_engine.add_lora(LoRARequest("tuned", 1, directory, load_inplace=True))}

    def unload(self, number=1):
        """An adapter."""
        return {"done": self.llm.llm_engine.remove_lora(number)}

    def usage(self, prompts):
        """(blocks in use, the share that vLLM's metric says) while these requests run."""
        from vllm import SamplingParams
        engine, pool = self.llm.llm_engine, self.scheduler.pool
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False))
        engine.step()
        said = {"in_use": pool._in_use, "usage": self.scheduler.kv_cache_manager.usage, "leased": pool.session.counters["leased"]}
        while engine.has_unfinished_requests():
            engine.step()
        return said

    def tables(self):
        """The highest number of a block in the worker's tables, and how many blocks are mapped."""
        runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        return {"highest": max(int(table.block_table.cpu.max()) for table in runner.input_batch.block_table.block_tables),
                "mapped": self.scheduler.pool.session.mapped_blocks}

    def reset(self, connector=False):
        return {"done": self.llm.reset_prefix_cache(reset_connector=connector)}

    def facts(self):
        facts = {"preemptions": self.preemptions, "scheduler": type(self.scheduler).__name__,
                 "groups": [type(group.kv_cache_spec).__name__ for group in self.scheduler.kv_cache_config.kv_cache_groups]}
        if (pool := getattr(self.scheduler, "pool", None)) is not None:
            if pool.session:
                # A session asks for its first blocks beside its word that the warm-up is over, and may be too early.
                self.refused += sum(verb != "lease" for verb, _, _ in pool.session.take_refusals())
            facts |= {"session": {"refused": self.refused}, "pool": pool.counters, "in_use": pool._in_use,
                      "detached": pool.detached, "own": pool.own, "waiting": len(pool._waiting) + len(pool._asked)}
        elif self.scheduler.connector is not None:
            from vllm.distributed.kv_transfer import has_kv_transfer_group
            lookup = self.scheduler.connector.lookup
            facts |= {"lookup": lookup.counts, "detached": lookup.detached,
                      "transfer": self.transfer().counts if has_kv_transfer_group() else None,
                      "holds": len(lookup._loading) + len(lookup._requests) + len(lookup._ahead) + len(lookup.saves),
                      "refused": lookup.session.counters["refused"] if lookup.session else 0}
        return facts

    def prefills_take(self, microseconds):
        """A token, from now on, as the daemon is told."""
        over = self.scheduler._prefills.over

        def said(output, session):
            def report_prefill(tokens, tokens_before, took):
                assert took > 0
                session.report_prefill(tokens, tokens_before, microseconds * tokens)
            over(output, types.SimpleNamespace(report_prefill=report_prefill))

        self.scheduler._prefills.over = said
        return {}

    def slow_tier(self):
        """From now on nothing that is below the pool comes to a request that waits for it."""
        below = self.scheduler.pool.below
        ask = below._ask

        def slowly(session, wait):
            asked = ask(session, wait)
            if asked:
                wait.pending = Slow(session, wait)
            return asked

        below._ask = slowly
        return {}

    def while_below_comes(self, prompts, end="", kill=None, tokens=20):
        """What is said to `prompts`, of which all are left out of steps until a tier has answered. end="abort": the first is aborted
        meanwhile; "reset": the cache is reset. kill: a process that dies meanwhile."""
        from vllm import SamplingParams
        engine, counters, said = self.llm.llm_engine, self.scheduler.pool.counters, {}

        def steps(until):
            while not until():
                for output in engine.step():
                    if output.finished and output.outputs:
                        said[output.request_id] = [list(output.outputs[0].token_ids), output.num_cached_tokens]

        waited = counters["waited_requests"]
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt},
                               SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False))
        steps(lambda: counters["waited_requests"] - waited == len(prompts))
        assert not said and not self.scheduler.running
        if end == "abort":
            engine.abort_request(["0"])
        elif end == "reset":
            assert self.llm.llm_engine.engine_core.engine_core.reset_prefix_cache()
        if kill is not None:
            os.kill(kill, signal.SIGKILL)
        steps(lambda: not self.scheduler.has_requests())
        return {"said": [said.get(str(i), [None])[0] for i in range(len(prompts))],
                "cached": [said.get(str(i), [None, None])[1] for i in range(len(prompts))]}

    def transfer(self):
        """The connector's half in the worker."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        return get_kv_transfer_group().transfer

    def flush(self):
        pool = getattr(self.scheduler, "pool", None)
        if pool is None:
            assert len(self.scheduler.connector.lookup.saves) == 0
        (pool or self.scheduler.connector.lookup).session.flush()
        return {}

    def damage(self, blocks, by):
        """Before its next load these blocks of the prefix become what they were not when they were found: by="bit", or by="block",
        another's bytes, as if they had left and their memory had another owner."""
        transfer = self.transfer()
        begin = transfer.begin

        def damaged(plan):
            if plan.loads:
                transfer.begin = begin
                refs = [ref & 0xffffffff for ref in plan.loads[0].refs]
                self.healthy = [(refs[block], transfer.pool.words[refs[block]].copy()) for block in blocks]
                for block in blocks:
                    if by == "bit":
                        transfer.pool.words[refs[block], 5000] ^= 1
                    else:
                        transfer.pool.words[refs[block]] = transfer.pool.words[refs[block + 1]]
            begin(plan)

        transfer.begin = damaged
        return {}

    def lose(self, pid, at):
        """The daemon dies before the request is looked up that is the so many-th from now."""
        lookup = self.scheduler.connector.lookup
        found, seen = lookup.found, []

        def dies(request, computed):
            if request.request_id not in seen:  # It is looked up again while its answer is on its way.
                seen.append(request.request_id)
                if len(seen) == at:
                    self._kill(pid)
                    lookup._requests[request.request_id].pending = None  # Its answer may have come: it asks again.
            return found(request, computed)

        lookup.found = dies
        return {}

    def while_saving(self, saves, prompts, end="", kill=None):
        """No block of the prompt `saves` is copied out while `prompts` are computed. end="abort": the first ends before its answer does;
        "preempt": it is preempted; "reset": the cache is reset, with all that runs."""
        from vllm import SamplingParams
        engine, transfer, scheduler = self.llm.llm_engine, self.transfer(), self.scheduler
        pool, copy, go_on = scheduler.kv_cache_manager.block_pool, transfer._copy_out, threading.Event()
        said = {}

        def add(name, prompt, tokens):
            engine.add_request(name, {"prompt_token_ids": prompt},
                               SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False))

        def steps(until):
            while not until():
                for output in engine.step():
                    if output.finished and output.outputs:
                        said[output.request_id] = list(output.outputs[0].token_ids)

        def held(*arguments):
            go_on.wait()
            return copy(*arguments)

        transfer._copy_out = held
        add("runs", [1, 2, 3], 300)  # What is saved is finished when no request is left.
        add("saves", saves, 40 if end in ("abort", "preempt") else 1)
        lookup = scheduler.connector.lookup
        steps(lambda: lookup.saves._copying)
        lookup.fills = False  # What comes now is not saved: its blocks would wait, too.
        if end == "abort":
            engine.abort_request(["saves"])
        elif end == "preempt":
            scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
            scheduler.prev_step_scheduled_req_ids.clear()
        elif end == "reset":
            assert self.llm.llm_engine.engine_core.engine_core.reset_prefix_cache(reset_running_requests=True)
        for i, prompt in enumerate(prompts):
            add(f"beside {i}", prompt, 20)
        steps(lambda: all(f"beside {i}" in said for i in range(len(prompts))))
        facts = {"held": sum(len(save.blocks) for save, _ in lookup.saves._copying.values()),
                 "runs": "runs" not in said}
        if kill is not None:
            self._kill(kill)
        go_on.set()
        steps(lambda: not scheduler.has_requests())
        transfer._copy_out, lookup.fills = copy, True
        return facts | {"beside": [said[f"beside {i}"] for i in range(len(prompts))],
                        "in_use": pool.num_gpu_blocks - pool.get_num_free_blocks() - 1}

    def while_loading(self, loads, prompts, end="", kill=None, tokens=20):
        """What is said to `prompts` while no block of the prompt `loads` comes, and then to that one. end="abort": it ends meanwhile; "raise":
        its copies raise. kill: a process that dies meanwhile."""
        from vllm import SamplingParams
        engine, transfer, said = self.llm.llm_engine, self.transfer(), {}
        pool, params = self.scheduler.kv_cache_manager.block_pool, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True,
                                                                                  detokenize=False)
        copy, go_on = transfer._copy_in, threading.Event()

        def held(*arguments):
            go_on.wait()
            if end == "raise":
                raise BufferError("no memory there")
            return copy(*arguments)

        def loading():
            return [request.status.name for request in self.scheduler.requests.values()
                    if request.num_computed_tokens and not request.num_output_tokens and request not in self.scheduler.running]

        def steps(until):
            while not until():
                for output in engine.step():
                    if output.finished and output.outputs:
                        said[output.request_id] = list(output.outputs[0].token_ids)

        transfer._copy_in = held
        lookup = self.scheduler.connector.lookup
        lookup.fills = False  # What is saved is copied behind what is loaded, and its blocks would wait.
        free = pool.get_num_free_blocks()
        engine.add_request("loads", {"prompt_token_ids": loads}, params)
        steps(loading)
        for i, prompt in enumerate(prompts):
            engine.add_request(f"beside {i}", {"prompt_token_ids": prompt}, params)
        if end == "abort":
            engine.abort_request(["loads"])
        steps(lambda: all(f"beside {i}" in said for i in range(len(prompts))))
        facts = {"loading": loading(), "held": free - pool.get_num_free_blocks()}
        if kill is not None:
            self._kill(kill)
        go_on.set()
        steps(lambda: not self.scheduler.has_requests())
        transfer._copy_in, lookup.fills = copy, True
        return facts | {"beside": [said[f"beside {i}"] for i in range(len(prompts))], "said": said.get("loads"),
                        "held_then": free - pool.get_num_free_blocks()}

    def hold_rank(self, rank, until):
        """This one copies out nothing until there is such a file."""
        def hold(worker):
            import pathlib
            import time
            from vllm.distributed.kv_transfer import get_kv_transfer_group
            transfer = get_kv_transfer_group().transfer
            copy = transfer._copy_out

            def held(*arguments):
                while not pathlib.Path(until).exists():
                    time.sleep(0.01)
                return copy(*arguments)

            if transfer.rank == rank:
                transfer._copy_out = held

        self.llm.llm_engine.engine_core.engine_core.model_executor.collective_rpc(hold)
        return {}

    def _kill(self, pid):
        """The daemon; until this engine sees it."""
        os.kill(pid, signal.SIGKILL)
        while _lives(self.scheduler.connector.lookup.session):
            time.sleep(0.01)

    def misfit(self):
        """The blocks of the next session are in memory that this worker can't have."""
        import numpy
        view = numpy.asarray

        def refuse(array):
            numpy.asarray = view
            raise BufferError("memory of another device")

        numpy.asarray = refuse
        return {}

    def heal(self):
        for ref, was in self.healthy:
            self.transfer().pool.words[ref] = was
        return {}


    def close(self):
        self.llm.llm_engine.engine_core.shutdown()


def main(kind=Engine):
    return adapter.serve(lambda: kind(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
