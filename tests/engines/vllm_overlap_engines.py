"""Two of kvpool's schedulers in one pool, for vllm_overlap_test.py, with workers whose K and V can be checked. Runs in the environment
that has vLLM.

vLLM's build for CPUs does not overlap steps, and a GPU's kernels are not here. So a worker writes, for each token, the digest of the
prefix that ends with it into the token's place in the pool's memory, and what it says next follows from the digest. Before that it
reads the places of all tokens in front: one that is not what it was is noticed at once. Steps wait in a queue, as in
EngineCore.step_with_batch_queue, and are done as late as can be, or at once, by dice.

argv[1]: {"model": directory, "socket": of the daemon, "overlap": whether steps do, "seed": of the dice, null for one request that is
aborted while a step of it is under way, "kill": the daemon's process id or null, "refused": whether engines begin in memory of their own
and workers can't go to the daemon's, "tails": how many different ends prompts have, 0: each its own}.
Prints {"tokens": how many were said, "found", "sealed": blocks, "promoted": tokens} once all requests have said what they should.
"""

import collections
import hashlib
import json
import os
import random
import signal
import sys
import types

import kvpool
import numpy
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpool_vllm import core, groups, keys, patches, space
from kvpool_vllm.scheduler import PooledAsyncScheduler, PooledScheduler

BLOCK = 16
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
BLOCK_BYTES = 64 << 10  # A block has room for BLOCK digests; it is this large so that the pool is small.
MOST_HELD = 56
STOPS = [[token] for token in range(1, 500, 15)]  # That a request stops there is known when the next step is under way.


def digest(before, token):
    return int.from_bytes(hashlib.sha256(f"{before} {token}".encode()).digest()[:7], "big")


def said_after(at):
    return at % 500 + 1


def answer(prompt, count):
    """What a model says that reads what it should."""
    at, said = 0, []
    for token in prompt:
        at = digest(at, token)
    while len(said) < count and said[-1:] not in STOPS:
        said.append(said_after(at))
        at = digest(at, said[-1])
    return said


class OnGpu(kvpool.Session):
    """That of a worker whose memory is on a GPU: a step that it says to be done is the first to see that the daemon is gone."""

    def complete_step_on_stream(self, step, stream):
        self.check()
        self.complete_step(step)


class Worker:
    """Also its own executor: it does what it is told in that order."""

    def __init__(self, refused):
        self.refused = refused
        self.space = self.words = None
        self.steps = collections.deque()
        self.tokens, self.blocks = {}, {}

    def use(self, here):
        self.space = here
        self.words = (numpy.from_dlpack(here.session.data(blocks=here.session.max_blocks)).view(numpy.uint64) if here.session is not None
                      else numpy.zeros((here.own.num_blocks, BLOCK), numpy.uint64))

    def collective_rpc(self, method, args):
        assert method == "kvpool_move"
        while self.steps and not self.steps[0].done:
            self._execute(next(step for step in self.steps if not step.done))
        (memory,) = args
        if memory.invitation is not None and self.refused:
            return ["no"]
        self.use(self.space)
        return [""]

    def _execute(self, step):
        plan, said = step.plan, {}
        for name in plan.finished_req_ids:
            self.tokens.pop(name, None), self.blocks.pop(name, None)
        computed = {}
        for new in plan.scheduled_new_reqs:
            self.tokens[new.req_id], self.blocks[new.req_id] = list(new.prompt_token_ids), list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for name, blocks, count in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            if name in cached.all_token_ids:
                self.tokens[name] = list(cached.all_token_ids[name])
            if name in cached.resumed_req_ids:
                self.blocks[name] = []
            self.blocks[name] += blocks[0] if blocks else []
            computed[name] = count
        for name, count in plan.num_scheduled_tokens.items():
            tokens, blocks, at = self.tokens[name], self.blocks[name], 0
            for position in range(computed[name] + count):
                at, place = digest(at, tokens[position]), (blocks[position // BLOCK], position % BLOCK)
                if position >= computed[name]:
                    self.words[place] = at
                assert self.words[place] == at, f"request {name}: K and V of token {position} of {len(tokens)} in block {place[0]} are another's"
            said[name] = []
            if computed[name] + count == len(tokens):
                said[name] = [said_after(at)]
                tokens.append(said[name][0])
        if getattr(plan, "kvpool_step", 0) and self.space.session is not None:
            self.space.computed(plan.kvpool_step)
        step.done, step.said = True, said

    def launch(self, plan, at_once):
        step = type("Step", (), {"plan": plan, "done": False, "said": None})
        self.steps.append(step)
        if at_once:
            self.catch_up()

    def catch_up(self):
        for step in self.steps:
            if not step.done:
                self._execute(step)

    def oldest(self):
        """(plan, its output) of the step that was launched first."""
        if not self.steps[0].done:
            self._execute(self.steps[0])
        step = self.steps.popleft()
        names = list(step.said)
        return step.plan, ModelRunnerOutput(req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
                                            sampled_token_ids=[step.said[name] for name in names])


class Engine:
    def __init__(self, config, asked, fingerprint, dice):
        kv_cache = KVCacheConfig(num_blocks=MOST_HELD, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)])
        of_model = (groups.Group(SPEC, None, (0,), 0),)
        terms = space.Terms(of_model, BLOCK_BYTES, fingerprint, {}, asked["socket"], 1)
        here = space.Space(None, space.Options(match_timeout=30), terms, space.Memory(MOST_HELD, (), None))
        here.asked = {"max_blocks": MOST_HELD, "magazine_blocks": space.magazine_of(MOST_HELD), "guaranteed_blocks": 26 if asked["seed"] else 0}
        if not asked["refused"]:
            here.session = terms.session(**here.asked)
            here.session.finish_warmup()
        keys.set_root(here.session.hash_seed if here.session is not None else fingerprint)
        here._on_gpu = True
        self.worker = here.executor = Worker(asked["refused"])
        self.worker.use(here)
        kv_cache.kvpool, kv_cache.num_blocks = here, here.session.max_blocks if here.session is not None else MOST_HELD
        config.cache_config.num_gpu_blocks = kv_cache.num_blocks
        kind = PooledAsyncScheduler if asked["overlap"] else PooledScheduler
        self.scheduler = kind(vllm_config=config, kv_cache_config=kv_cache, block_size=BLOCK, log_stats=True,
                              structured_output_manager=StructuredOutputManager(config))
        self.depth, self.dice = 2 if asked["overlap"] else 1, dice
        self.said = {}

    def step(self):
        """As EngineCore's loop. False: there was nothing to do."""
        steps = self.worker.steps
        if self.worker.refused and (opening := self.scheduler._opener._thread) is not None:
            opening.join()  # A model's step takes longer.
        if self.scheduler.has_requests():
            plan = self.scheduler.schedule()
            self.worker.launch(plan, at_once=self.dice.random() < 0.3)
            if len(steps) < self.depth and plan.total_num_scheduled_tokens > 0:
                return True
        elif not steps:
            return False
        for outputs in self.scheduler.update_from_output(*self.worker.oldest()).values():
            for output in outputs.outputs:
                self.said.setdefault(output.request_id, []).extend(output.new_token_ids)
        return True


def config_of(asked):
    config = EngineArgs(model=asked["model"], skip_tokenizer_init=True, dtype="float32", block_size=BLOCK, max_model_len=1024,
                        max_num_batched_tokens=128, max_num_seqs=8).create_engine_config()
    register_all_kvcache_specs(config)
    return config


def request_of(name, prompt, count):
    params = SamplingParams(max_tokens=count, ignore_eos=True, stop_token_ids=[token for (token,) in STOPS])
    params.update_from_generation_config({}, None)
    return Request(request_id=name, prompt_token_ids=prompt, sampling_params=params, pooling_params=None,
                   block_hasher=get_request_block_hasher(BLOCK, sha256))


def abort_while_a_step_is_under_way(asked):
    """Prints what another session can lease of the request's sealed blocks, before and after that step."""
    engine = Engine(config_of(asked), asked, os.urandom(32), random.Random(0))
    init_none_hash(sha256)
    scheduler, worker = engine.scheduler, engine.worker
    scheduler.add_request(request_of("0", list(range(1, 5 * BLOCK)), 40))
    for _ in range(2):
        worker.launch(scheduler.schedule(), at_once=False)
    scheduler.update_from_output(*worker.oldest())
    sealed = {block.block_id for block in scheduler.kv_cache_manager.get_blocks("0").blocks[0] if scheduler.pool._shared[block.block_id]}
    scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED)
    scheduler.pool.session.flush()
    other = worker.space.terms.session(magazine_blocks=0)
    other.finish_warmup()
    leased = []

    def lease_all():
        try:
            while True:
                leased.extend(ref & 0xffffffff for ref in other.lease(1, timeout=0.2).detach())
        except (kvpool.ResourceExhaustedError, kvpool.DeadlineExceededError):
            return len(sealed & set(leased))

    before = lease_all()
    worker.oldest()
    scheduler.pool.session.flush()
    print(json.dumps({"sealed": len(sealed), "before": before, "after": lease_all()}))


def main():
    asked = json.loads(sys.argv[1])
    core.watched = True
    patches.take_keys()
    kvpool.Session, torch.cuda.current_stream = OnGpu, lambda: types.SimpleNamespace(cuda_stream=0)
    if asked["seed"] is None:
        abort_while_a_step_is_under_way(asked)
        return
    dice = random.Random(asked["seed"])
    fingerprint = os.urandom(32)
    engines = [Engine(config_of(asked), asked, fingerprint, dice) for _ in range(2)]
    init_none_hash(sha256)
    shared = [dice.randrange(1, 512) for _ in range(200)]
    tails = [[dice.randrange(1, 512) for _ in range(dice.randint(1, 120))] for _ in range(asked["tails"])]
    wanted, aborted = {}, set()
    kill_at = 60 if asked["kill"] else -1
    for turn in range(5000 if asked["refused"] else 100000):
        if len(wanted) < 120 and dice.random() < 0.4:
            name, engine = str(len(wanted)), dice.choice(engines)
            tail = dice.choice(tails) if tails else [dice.randrange(1, 512) for _ in range(dice.randint(1, 120))]
            prompt = shared[:dice.choice((0, 40, 96, 200))] + tail
            count = dice.randint(1, 60)
            wanted[name] = engine, prompt, count
            engine.scheduler.add_request(request_of(name, prompt, count))
        if wanted and dice.random() < 0.02:
            name = dice.choice(list(wanted))
            wanted[name][0].scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            aborted.add(name)
        if turn == kill_at:
            os.kill(asked["kill"], signal.SIGKILL)
        busy = [engine.step() for engine in dice.sample(engines, 2)]
        if not any(busy) and len(wanted) == 120:
            break
    for name, (engine, prompt, count) in wanted.items():
        said, should = engine.said.get(name, []), answer(prompt, count)
        assert said == should or (name in aborted and said == should[:len(said)]), f"request {name} of {len(prompt)} tokens"
    for engine in engines:
        assert engine.scheduler.pool._in_use == 0
        assert engine.scheduler.pool.own == bool(asked["kill"] or asked["refused"])
    stats = [engine.scheduler.pool.counters for engine in engines]
    print(json.dumps({"tokens": sum(len(said) for engine in engines for said in engine.said.values()), "found": sum(each["found_blocks"] for each in stats),
                      "sealed": sum(each["sealed_blocks"] for each in stats),
                      "promoted": sum(each["promoted_tokens"] for each in stats)}))


if __name__ == "__main__":
    main()
