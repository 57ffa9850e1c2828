"""GRPO on a CPU: a tiny model learns to count by its own samples, in less than a minute.

The engine samples (rollouts), plain transformers trains, and each step's weights go back into the running engine, in place.

    python examples/grpo.py --logprobs engine     # importance ratios by the engine's log-probabilities
    python examples/grpo.py --logprobs trainer    # by the trainer's own, from a second forward
"""

import argparse
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream import LLM, SamplingParams

NUMBERS, LENGTH = 16, 4  # counts modulo 16; an answer has the next four numbers
GROUP, CLIP = 16, 0.2  # samples of a prompt, whose mean is their baseline; PPO's bound


def reward(start: int, answer: list[int]) -> float:
    """The share of right numbers before the first wrong one, and a little for those after it."""
    right = [n == (start + 1 + i) % NUMBERS for i, n in enumerate(answer)]
    first_wrong = right.index(False) if False in right else LENGTH
    return (0.8 * first_wrong + 0.2 * sum(right)) / LENGTH


def log_probs(model, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The trainer's log-probabilities of the answers [N, LENGTH]."""
    logits = model(torch.cat([prompts, answers], 1)).logits[:, prompts.shape[1] - 1 : -1].float()
    return logits.log_softmax(-1).gather(2, answers[:, :, None])[:, :, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logprobs", choices=("engine", "trainer"), default="engine")
    parser.add_argument("--steps", type=int, default=140)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for so small a model threads only wait for each other
    sizes = dict(vocab_size=NUMBERS, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, eos_token_id=None)
    policy = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    starts = torch.arange(NUMBERS).repeat_interleave(GROUP)
    prompts = [{"prompt_token_ids": [n]} for n in range(NUMBERS)]
    farthest, rewards = 0.0, torch.zeros(1)

    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder)
        llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", device="cpu", num_threads=1)
    with llm:
        for step in range(args.steps):
            sampling = SamplingParams(
                n=GROUP, max_tokens=LENGTH, temperature=1.0, logprobs=0, ignore_eos=True, seed=step
            )
            rollouts = [
                o for a in llm.generate(prompts, sampling, progress=False) for o in a.outputs
            ]
            assert all(
                o.weight_versions == [(str(step), LENGTH)] for o in rollouts
            )  # none is stale
            answers = torch.tensor([o.token_ids for o in rollouts])
            sampled = torch.tensor([[p.chosen.logprob for p in o.logprobs] for o in rollouts])
            rewards = torch.tensor(
                [reward(n, o.token_ids) for n, o in zip(starts.tolist(), rollouts, strict=True)]
            )
            groups = rewards.view(NUMBERS, GROUP)
            spread = groups.std(1, keepdim=True) + 1e-4
            advantages = ((groups - groups.mean(1, keepdim=True)) / spread).view(-1, 1)

            now = log_probs(policy, starts[:, None], answers)
            farthest = max(farthest, (now.detach() - sampled).abs().max().item())
            old = sampled if args.logprobs == "engine" else now.detach()
            ratio = (now - old).exp()
            loss = -torch.min(
                ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
            ).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            llm.start_weight_update()
            llm.update_weights({"tensors": policy.state_dict()})
            info = llm.finish_weight_update(weight_version=str(step + 1))
            if step % 20 == 0 or step == args.steps - 1:
                print(f"step {step:3}  reward {rewards.mean():.3f}  weights {info.checksum}")
        print(f"farthest log-probability from the trainer's: {farthest:.1e}")
        counted = llm.generate(prompts[:3], SamplingParams(temperature=0, max_tokens=LENGTH))
        for answer in counted:
            print(answer.prompt_token_ids, "→", answer.outputs[0].token_ids)
    if args.steps >= 100 and rewards.mean() < 0.6:
        raise SystemExit("the model has not learnt to count")


if __name__ == "__main__":
    main()
