"""vllm_engine.py's engine, and what vllm_features_test.py asks of it beside greedy answers."""

import sys

import vllm_engine


def _plain(logprobs):
    return logprobs and [{str(token): one.logprob for token, one in at.items()} if at else None for at in logprobs]


class Engine(vllm_engine.Engine):

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **{"skip_tokenizer_init": False, **more})
        self.drafts = [0, 0]  # Accepted, rejected.
        if hasattr(self, "scheduler"):
            count = self.scheduler.make_spec_decoding_stats

            def counted(stats, num_draft_tokens, num_accepted_tokens, **more):
                self.drafts[0] += num_accepted_tokens
                self.drafts[1] += num_draft_tokens - num_accepted_tokens
                return count(stats, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **more)

            self.scheduler.make_spec_decoding_stats = counted

    def facts(self):
        return super().facts() | {"drafts": self.drafts}

    def _params(self, regex=None, **more):
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
        if regex is not None:
            more["structured_outputs"] = StructuredOutputsParams(regex=regex)
        return SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, "detokenize": False, **more})

    def sample(self, prompts, priority=None, **params):
        """`params`: of SamplingParams, for all prompts."""
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], self._params(**params), use_tqdm=False,
                                    priority=priority)
        return {"tokens": [[list(answer.token_ids) for answer in output.outputs] for output in outputs],
                "why": [[answer.finish_reason for answer in output.outputs] for output in outputs],
                "logprobs": [[_plain(answer.logprobs) for answer in output.outputs] for output in outputs],
                "prompt_logprobs": [_plain(output.prompt_logprobs) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs]}

    def beams(self, prompts, width, tokens):
        from vllm.sampling_params import BeamSearchParams
        outputs = self.llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts],
                                       BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True))
        return {"tokens": [[list(beam.tokens) for beam in output.sequences] for output in outputs]}

    def embed(self, prompts):
        outputs = self.llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        return {"vectors": [output.outputs.embedding for output in outputs], "cached": [output.num_cached_tokens for output in outputs]}

    def interrupt(self, prompts, step, abort=(), pause=None, tokens=20):
        """Answers, in which after so many steps those of `abort` are aborted, or all is paused, {"mode", "clear_cache"}, while the last
        prompt comes."""
        engine, names = self.llm.llm_engine, [str(i) for i in range(len(prompts))]
        late = names[-1:] if pause else []
        for name, prompt in zip(names, prompts):
            if name not in late:
                engine.add_request(name, {"prompt_token_ids": prompt}, self._params(max_tokens=tokens))
        said, now = {}, 0
        while now <= step or engine.has_unfinished_requests():
            if now == step:
                engine.abort_request([names[i] for i in abort])
                if pause:
                    core = engine.engine_core.engine_core
                    core.pause_scheduler(**pause)
                    engine.add_request(late[0], {"prompt_token_ids": prompts[-1]}, self._params(max_tokens=tokens))
                    assert not core.scheduler.has_unfinished_requests() and not any(output.finished for output in engine.step())
                    core.resume_scheduler()
            for output in engine.step():
                if output.finished and output.outputs[0].finish_reason != "abort":
                    said[output.request_id] = list(output.outputs[0].token_ids)
            now += 1
        return {"tokens": [said.get(name) for name in names]}

    def stream(self, chunks, tokens, ends=True):
        """A session whose prompt comes in parts, each once the answer to what was there is said. What AsyncLLM does, a step at a time.
        ends: else it waits for more, which another call brings."""
        engine, core = self.llm.llm_engine, self.llm.llm_engine.engine_core.engine_core
        make = engine.input_processor.process_inputs
        said, waiting = [], []
        for chunk in [*chunks, *([None] if ends else [])]:
            request = make("session", {"prompt_token_ids": chunk or [0]}, self._params(max_tokens=tokens),
                           supported_tasks=("generate",), resumable=chunk is not None)
            core.add_request(*core.preprocess_add_request(request))
            if chunk is None:
                break
            waiting.append(len(self.scheduler.pool._asked) if hasattr(self.scheduler, "pool") else 0)
            said.append([])
            for _ in range(100 + tokens):  # More steps than it takes.
                if len(said[-1]) >= tokens:
                    break
                for outputs in (core.step_fn()[0] or {}).values():
                    for output in outputs.outputs:
                        said[-1] += output.new_token_ids
        return {"tokens": said, "asked": waiting}


if __name__ == "__main__":
    sys.exit(vllm_engine.main(Engine))
