"""GRPO: a model learns to count by its own samples.

The engine samples (rollouts), plain transformers trains, and each step's weights go back into the running engine, in place.

    python examples/grpo.py                             # a tiny model, from nothing; less than a minute on a CPU
    python examples/grpo.py --logprobs trainer          # importance ratios by the trainer's own log-probabilities
    python examples/grpo.py --model smollm2 --steps 60 --device cuda   # SmolLM2 learns to count in steps

On a CPU a step of SmolLM2 takes minutes. `--record FILE` leaves each step's reward, and how far the two log-probabilities
are apart, as JSON.
"""

import argparse
import json
import re
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream import LLM, SamplingParams

CLIP = 0.2  # PPO's bound
MICRO_BATCH = 64  # answers in one forward of the trainer


class Counting:
    """A tiny model counts modulo 16: a token is a number, an answer the next four."""

    numbers, length, group, rate, learnt = 16, 4, 16, 3e-3, 0.6

    def __init__(self, device: torch.device) -> None:
        sizes = dict(vocab_size=self.numbers, hidden_size=64, intermediate_size=128)
        config = AutoConfig.for_model(
            "llama", **sizes, num_hidden_layers=2, num_attention_heads=4, eos_token_id=None
        )
        self.policy = AutoModelForCausalLM.from_config(config).to(device)
        self.prompts = [[n] for n in range(self.numbers)]

    def engine(self, folder: str, **settings) -> LLM:
        self.policy.save_pretrained(folder)
        return LLM(folder, skip_tokenizer_init=True, **settings)

    def reward(self, number: int, output) -> float:
        """The share of right numbers before the first wrong one, and a little for those after it."""
        right = [n == (number + 1 + i) % self.numbers for i, n in enumerate(output.token_ids)]
        first_wrong = right.index(False) if False in right else self.length
        return (0.8 * first_wrong + 0.2 * sum(right)) / self.length


class CountingInSteps:
    """SmolLM2 counts on by threes, fours and so on, in text."""

    length, group, rate, learnt = 20, 16, 2e-5, 0.0

    def __init__(self, device: torch.device, name: str) -> None:
        from slipstream.compress.dense import load_dense
        from slipstream.hub import resolve_model

        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "model"
        load_dense(resolve_model(name), dtype=torch.float32, device=torch.device("cpu")).write(path)
        self.policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
        self.path = str(path)
        self.tasks = [(step, start) for step in (3, 4, 6, 7) for start in (2, 5, 11, 20)]

    def engine(self, folder: str, **settings) -> LLM:
        llm = LLM(self.path, max_model_len=256, **settings)
        texts = [
            f"Count in steps of {step}: {start}, {start + step}, {start + 2 * step},"
            for step, start in self.tasks
        ]
        self.prompts = [llm.get_tokenizer().encode(text) for text in texts]
        return llm

    def reward(self, number: int, output) -> float:
        """The share of the next four numbers that come before a wrong one."""
        step, start = self.tasks[number]
        told = [int(n) for n in re.findall(r"\d+", output.text)][:4]
        right = 0
        while right < len(told) and told[right] == start + (3 + right) * step:
            right += 1
        return right / 4


def log_probs(model, prompts: list[list[int]], answers: list[list[int]], device) -> torch.Tensor:
    """The trainer's log-probabilities of the answers [N, longest]; 0 beyond an answer's end."""
    lengths = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt, answer in zip(ids, prompts, answers, strict=True):
        row[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)  # padding is at the end
    logp = model(ids.to(device)).logits[:, :-1].float().log_softmax(-1)
    logp = logp.gather(2, ids[:, 1:, None].to(device))[:, :, 0]
    longest = max(map(len, answers))
    found = [
        torch.nn.functional.pad(row[len(p) - 1 : len(p) - 1 + len(a)], (0, longest - len(a)))
        for row, p, a in zip(logp, prompts, answers, strict=True)
    ]
    return torch.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="such as smollm2 (default: a tiny one)")
    parser.add_argument("--logprobs", choices=("engine", "trainer"), default="engine")
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--dtype", default="float32", help="of the engine; the trainer has float32 (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", metavar="FILE")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if args.model is None:
        torch.set_num_threads(1)  # for so small a model threads only wait for each other
    device = torch.device(args.device)
    task = Counting(device) if args.model is None else CountingInSteps(device, args.model)
    policy, group, record = task.policy, task.group, []
    names = ("logprobs", "device", "dtype", "seed")
    told = {"model": args.model or "tiny", **{name: getattr(args, name) for name in names}}
    optimizer = torch.optim.Adam(policy.parameters(), lr=task.rate)
    settings = {"dtype": args.dtype, "device": args.device}
    settings |= {"kv_cache_bytes": 2**30} if args.device == "cuda" else {"num_threads": 1}

    with tempfile.TemporaryDirectory() as folder:
        llm = task.engine(folder, **settings)
    with llm:
        asked = [{"prompt_token_ids": prompt} for prompt in task.prompts]
        for step in range(args.steps):
            sampling = SamplingParams(
                n=group,
                max_tokens=task.length,
                temperature=1.0,
                logprobs=0,
                seed=1000 * args.seed + step,
            )
            groups = [answer.outputs for answer in llm.generate(asked, sampling, progress=False)]
            rollouts = [(n, output) for n, own in enumerate(groups) for output in own]
            assert all({v for v, _ in o.weight_versions} == {str(step)} for _, o in rollouts)
            rewards = torch.tensor([task.reward(n, o) for n, o in rollouts])
            grouped = rewards.view(-1, group)
            spread = grouped.std(1, keepdim=True) + 1e-4
            advantages = ((grouped - grouped.mean(1, keepdim=True)) / spread).flatten()

            num_tokens, farthest = sum(len(o.token_ids) for _, o in rollouts), 0.0
            optimizer.zero_grad()
            for begin in range(0, len(rollouts), MICRO_BATCH):
                some = rollouts[begin : begin + MICRO_BATCH]
                answers = [o.token_ids for _, o in some]
                now = log_probs(policy, [task.prompts[n] for n, _ in some], answers, device)
                sampled, there = torch.zeros_like(now), torch.zeros_like(now)
                for i, (_, output) in enumerate(some):
                    own = [p.chosen.logprob for p in output.logprobs]
                    sampled[i, : len(own)], there[i, : len(own)] = torch.tensor(own), 1
                farthest = max(farthest, (now.detach() - sampled).abs().max().item())
                old = sampled if args.logprobs == "engine" else now.detach()
                gain = advantages[begin : begin + len(some), None].to(device)
                ratio = (now - old).exp()
                surrogate = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
                loss = -(surrogate * there).sum() / num_tokens
                loss.backward()
            optimizer.step()

            llm.start_weight_update()
            llm.update_weights({"tensors": policy.state_dict()})
            info = llm.finish_weight_update(weight_version=str(step + 1))
            record.append({"reward": rewards.mean().item(), "farthest": farthest})
            if args.record:
                Path(args.record).write_text(json.dumps({**told, "steps": record}))
            if step % 20 == 0 or step == args.steps - 1:
                print(f"step {step:3}  reward {rewards.mean():.3f}  weights {info.checksum}")
        print(f"farthest log-probability: {max(r['farthest'] for r in record):.1e}")
        greedy = SamplingParams(temperature=0, max_tokens=task.length)
        for answer in llm.generate(asked[:3], greedy, progress=False):
            print(
                answer.prompt_token_ids, "→", answer.outputs[0].text or answer.outputs[0].token_ids
            )
    if args.steps >= 100 and record[-1]["reward"] < task.learnt:
        raise SystemExit("the model has not learnt to count")


if __name__ == "__main__":
    main()
