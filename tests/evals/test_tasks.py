"""Tasks: log-likelihoods against transformers, multiple choice from a file, and lm-eval where it is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

from slipstream import LLM
from slipstream.cli.main import main
from slipstream.errors import AdapterError, ConfigError
from slipstream.evals.likelihood import Likelihood
from slipstream.evals.tasks import (
    Question,
    RatedAnswer,
    _result,
    check_tasks,
    loglikelihoods,
    multiple_choice,
    rated_answers,
    read_questions,
    read_rated,
    run_lm_eval,
    run_tasks,
)
from slipstream.evals.text import Document, read_documents
from slipstream.params.lora_request import LoRARequest
from tests.support import tiny_models


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, tiny_models.build_with_tokenizer(folder)


@pytest.fixture(scope="module")
def llm(model):
    with LLM(
        str(model[0]),
        dtype="float32",
        device="cpu",
        max_model_len=48,
        max_num_seqs=4,
        num_threads=1,
    ) as llm:
        yield llm


def theirs(model, context, continuation):
    with torch.inference_mode():
        logp = model(input_ids=torch.tensor([[*context, *continuation]])).logits[0].log_softmax(-1)
    rows = logp[len(context) - 1 : -1]
    total = rows.gather(1, torch.tensor(continuation)[:, None]).sum().item()
    return total, rows.argmax(-1).tolist() == list(continuation)


def test_loglikelihoods_are_transformers(model, llm):
    context = [10, 20, 30, 40]
    likeliest = []
    for _ in range(3):
        with torch.inference_mode():
            likeliest.append(
                int(model[1](input_ids=torch.tensor([context + likeliest])).logits[0, -1].argmax())
            )
    pairs = [
        (context, [50, 60]),
        (context, likeliest),
        (context, [*likeliest[:2], likeliest[2] - 1]),
        ([7], [8]),
    ]
    found = loglikelihoods(llm, pairs)
    for pair, ours in zip(pairs, found, strict=True):
        logprob, greedy = theirs(model[1], *pair)
        assert ours.logprob == pytest.approx(logprob, abs=1e-3)
        assert ours.is_greedy == greedy
    assert [f.is_greedy for f in found][1:3] == [True, False]


def test_a_long_context_loses_its_beginning(model, llm):
    context, continuation = [i % 200 + 10 for i in range(100)], [50, 60, 70]
    (found,) = loglikelihoods(llm, [(context, continuation)])
    assert found.logprob == pytest.approx(
        theirs(model[1], context[-(47 - 3) :], continuation)[0], abs=1e-3
    )
    with pytest.raises(ConfigError, match="too many to score"):
        loglikelihoods(llm, [([1], [5] * 47)])
    for pair in (([], [1]), ([1], [])):
        with pytest.raises(ConfigError, match="pair 0"):
            loglikelihoods(llm, [pair])


def questions_of(llm, num):
    """Questions whose right answer is what the model itself finds likelier, and their wrong twins."""
    tokenizer, rows = llm.get_tokenizer(), []
    for i in range(num):
        prompt, choices = f"hello {i}", ["the", "in the hour"]
        context = tokenizer.encode(prompt)
        scores = []
        for choice in choices:
            whole = tokenizer.encode(f"{prompt} {choice}")
            scores.append(
                loglikelihoods(llm, [(context, whole[len(context) :])])[0].logprob / len(choice)
            )
        rows.append({"prompt": prompt, "choices": choices, "answer": scores.index(max(scores))})
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_multiple_choice_takes_the_likeliest_answer(llm, tmp_path):
    rows = questions_of(llm, 4)
    rows[1]["answer"] = 1 - rows[1]["answer"]
    path = write(tmp_path / "hours.jsonl", rows)
    (found,) = run_tasks(llm, [path])
    assert (found.name, found.metric, found.num_questions) == ("hours", "acc_norm", 4)
    assert found.value == 0.75
    assert found.stderr == pytest.approx((0.75 * 0.25 / 4) ** 0.5)
    assert run_tasks(llm, [path], limit=1)[0].value == 1.0
    assert multiple_choice(llm, read_questions(tmp_path / "hours.jsonl")).value == 0.75
    with pytest.raises(ConfigError, match="lm-eval"):
        run_tasks(llm, [path], num_fewshot=2)


class Texts:
    """A model of which only texts are asked, whose answers have the log-probabilities `logprobs`."""

    chat_template = "a template"

    def __init__(self, monkeypatch, *logprobs):
        found = [Likelihood(logprob=logprob, is_greedy=False) for logprob in logprobs]
        monkeypatch.setattr("slipstream.evals.tasks.loglikelihoods", lambda *_: found)

    def get_tokenizer(self):
        return self

    def encode(self, text, add_special_tokens=True):
        return list(text.encode())

    def apply_chat_template(self, messages):
        return str(messages)


def test_a_choice_is_weighed_by_its_bytes_and_not_its_characters(monkeypatch):
    texts = Texts(monkeypatch, -6.0, -4.4)  # nats: 6 bytes at 1, 4 at 1.1
    question = Question(prompt="?", choices=("żół", "abcd"), answer=0)
    assert multiple_choice(texts, [question]).value == 1.0


def test_equal_answers_are_half_a_pair_each(monkeypatch):
    same = ((("role", "user"), ("content", "?")),)
    rated = [RatedAnswer(messages=same, answer="ab", is_good=good) for good in (True, False)]
    assert rated_answers(Texts(monkeypatch, -1.0, -1.0), rated).value == 0.5


def test_a_long_choice_is_not_held_against_itself(llm):
    encode, questions, apart = llm.get_tokenizer().encode, [], 0
    for i in range(8):
        choices, context = ("z", "hello"), encode(f"in {i}")
        sums = [
            f.logprob
            for f in loglikelihoods(
                llm, [(context, encode(f"in {i} {c}")[len(context) :]) for c in choices]
            )
        ]
        rates = [total / len(choice) for total, choice in zip(sums, choices, strict=True)]
        questions.append(
            Question(prompt=f"in {i}", choices=choices, answer=rates.index(max(rates)))
        )
        apart += rates.index(max(rates)) != sums.index(max(sums))
    assert apart  # else this test tells nothing
    assert multiple_choice(llm, questions).value == 1.0


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2 is no JSON"),
        ('{"prompt": "a", "choices": ["b", "c"]}', "line 2: "),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "index of a choice"),
        ('{"prompt": "", "choices": ["b", "c"], "answer": 0}', "line 2"),
        ('{"prompt": "a", "choices": ["b"], "answer": 0}', "line 2"),
        ('{"prompt": "a", "choices": ["b", ""], "answer": 0}', "line 2"),
        ("[]", "line 2"),
    ],
)
def test_questions_that_are_none(tmp_path, line, told):
    (tmp_path / "q.jsonl").write_text(
        '{"prompt": "a", "choices": ["b", "c"], "answer": 0}\n' + line + "\n"
    )
    with pytest.raises(ConfigError, match=told):
        read_questions(tmp_path / "q.jsonl")


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        read_questions(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no questions"):
        read_questions(tmp_path / "empty.jsonl")


def test_the_command_answers_them(model, llm, tmp_path, capsys):
    path = write(tmp_path / "hours.jsonl", questions_of(llm, 2))
    (tmp_path / "text.txt").write_text("hello the world in the hour " * 5)
    words = [
        "eval",
        str(model[0]),
        f"--text={tmp_path}/text.txt",
        "--part=all",
        "--context=32",
        "--dtype=float32",
        "--json",
    ]
    words += ["--device=cpu", "--num-threads=1", f"--tasks={path}"]
    assert main(words) == 0
    alone = json.loads(capsys.readouterr().out)["tasks"]
    assert [(t["name"], t["value"]) for t in alone] == [("hours", 1.0)]
    assert main([*words, "--kv-cache-dtype-b=int8", "--limit=1"]) == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert (task["original"], task["num_questions"]) == (1.0, 1)
    assert main([*words, "--limit=0"]) == 2


def test_a_standard_error_is_no_metric():
    values = {"alias": "t", "own_stderr,none": 0.1, "own,none": 0.5}
    found = _result("t", {"results": {"t": values}})
    assert (found.metric, found.value, found.stderr) == ("own", 0.5, 0.1)


def test_without_lm_eval(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"\[eval\]"):
        run_tasks(llm, ["hellaswag"])


# --- With lm-eval -----------------------------------------------------------------------------------------------------


class Instance:
    def __init__(self, *args):
        self.args = args


@pytest.fixture
def adapter(llm):
    pytest.importorskip("lm_eval")
    from slipstream.evals.lm_eval_adapter import SlipstreamLM

    return SlipstreamLM(llm)


def test_the_adapters_loglikelihoods_equal_the_models(adapter, model, llm):
    encode = llm.get_tokenizer().encode
    (found, bare) = adapter.loglikelihood(
        [Instance("hello the", " world"), Instance("", "hello")], disable_tqdm=True
    )
    assert found[0] == pytest.approx(
        theirs(model[1], encode("hello the"), encode(" world"))[0], abs=1e-3
    )
    assert bare[0] == pytest.approx(
        theirs(model[1], [0], encode("hello"))[0], abs=1e-3
    )  # after <s>


def test_adapter_rolling_scores_every_token_once(adapter, model, llm):
    ids = llm.get_tokenizer().encode("hello the world in the hour " * 8)
    assert len(ids) > 96
    text = llm.get_tokenizer().decode(ids)
    (found,) = adapter.loglikelihood_rolling([Instance(text)])
    whole = adapter.max_length - 2
    wanted, done = theirs(model[1], [0], ids[:whole])[0], whole
    while done < len(ids):  # each further window has as much before it as fits
        scored = ids[done : done + whole]
        end = done + len(scored)
        wanted += theirs(model[1], ids[end - whole - 1 : done], scored)[0]
        done = end
    assert found == pytest.approx(wanted, abs=0.05)


def test_the_adapter_generates_until_a_stop(adapter, llm):
    (text,) = adapter.generate_until(
        [Instance("hello", {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False})]
    )
    from slipstream import SamplingParams

    wanted = (
        llm.generate("hello", SamplingParams(temperature=0, max_tokens=6, stop=("\n\n",)))[0]
        .outputs[0]
        .text
    )
    assert text == wanted
    with pytest.raises(ConfigError, match="beams"):
        adapter.generate_until([Instance("hello", {"beams": 4})])
    with pytest.raises(ConfigError, match="max_model_len"):
        adapter.generate_until([Instance("hello", {"max_gen_toks": 48})])


def test_the_adapter_uses_the_chat_template(adapter):
    assert "<|im_start|>user\nhello<|im_end|>" in adapter.apply_chat_template(
        [{"role": "user", "content": "hello"}]
    )
    assert adapter.chat_template(True) == adapter.tokenizer.chat_template


def test_a_task_of_lm_eval(adapter, llm, tmp_path):
    """A tiny task, defined here, through lm-eval's own evaluator: the same as our own multiple choice."""
    rows = questions_of(llm, 6)
    rows[2]["answer"] = 1 - rows[2]["answer"]
    path = write(tmp_path / "hours.jsonl", rows)
    task = {
        "task": "hours",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": path}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [
            {"metric": m, "aggregation": "mean", "higher_is_better": True}
            for m in ("acc", "acc_norm")
        ],
    }
    (found,) = run_lm_eval(llm, [task]).values()
    assert (found.name, found.metric, found.num_questions) == ("hours", "acc_norm", 6)
    assert found.value == pytest.approx(5 / 6)
    with pytest.raises(ConfigError, match="no task no_such_task"):
        run_tasks(llm, ["no_such_task"])


def test_the_engine_does_not_load_it():
    code = (
        "import sys, slipstream.evals.tasks, slipstream.engine.llm; print('lm_eval' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"


def rated_file(folder, given):
    """Rated answers to questions: (question, answer, rating)."""
    path = folder / "rated.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ],
            "rating": rating,
        }
        for question, answer, rating in given
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rated_answers_compare_those_rated_up_with_those_rated_down(llm, tmp_path):
    answers = [("hi", text, "up") for text in ("aa", "b", "hello")]
    path = rated_file(tmp_path, [*answers, ("hi", "zq", "down"), ("ho", "zzz", "down")])
    (found,) = run_tasks(llm, [str(path)], part="all")
    assert (found.metric, found.num_pairs, found.num_questions) == ("preferred", 3, 4)
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    context = tokenizer.encode(prompt, add_special_tokens=False)
    texts = ["aa", "b", "hello", "zq"]
    pairs = [(context, tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    *up, down = [
        likelihood.logprob / len(text)
        for likelihood, text in zip(loglikelihoods(llm, pairs), texts, strict=True)
    ]
    assert found.value == pytest.approx(sum(rate > down for rate in up) / 3)
    (auc,) = found.also
    assert (auc.metric, auc.scored) == ("auc", "6 pairs of 5 rated answers")


def test_rated_answers_to_other_questions_are_compared_with_all(llm, tmp_path):
    given = [("hi", "aa", "up"), ("ho", "bb", "up"), ("he", "cc", "down")]
    found, mirrored = (
        run_tasks(llm, [str(rated_file(tmp_path, rows))], part="all")[0]
        for rows in (given, [(q, a, "down" if r == "up" else "up") for q, a, r in given])
    )
    assert (found.metric, found.num_pairs, found.also) == ("auc", 2, ())
    assert found.value + mirrored.value == pytest.approx(1)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"messages": [], "rating": "up"}', "line 1"),
        ('{"messages": [{"role": "user", "content": "a"}], "rating": "up"}', "line 1"),
        ('{"rating": ', "no JSON"),
    ],
)
def test_broken_rated_answers_are_named(tmp_path, line, why):
    path = tmp_path / "rated.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=why):
        read_rated(path)


def test_answers_of_one_rating_compare_nothing(tmp_path):
    with pytest.raises(ConfigError, match="--rating all"):
        read_rated(rated_file(tmp_path, [("hi", "aa", "up")] * 2))


def test_rated_answers_that_training_takes_are_not_scored(tmp_path):
    given = [(f"q{i}", f"a{i}", rating) for i in range(20) for rating in ("up", "down")]
    path = rated_file(tmp_path, given)
    trained = {d.turns for d in read_documents(str(path), "calibration")}
    scored = {
        (*(tuple(dict(m).values()) for m in r.messages), ("assistant", r.answer))
        for r in read_rated(path)
    }
    assert min(len(trained), len(scored)) > 0
    assert len(trained | scored) == 20
    assert not trained & scored
    assert len(read_rated(path, "all")) == 40


def test_rated_answers_may_hold_other_ends_of_lines(tmp_path):
    path = rated_file(tmp_path, [("hi", "a\u2028b", "up"), ("hi", "c\x85d", "down")])
    path.write_text(
        "".join(
            f"{json.dumps(json.loads(line), ensure_ascii=False)}\n"
            for line in path.read_text("utf-8").split("\n")
            if line
        ),
        "utf-8",
    )
    assert [r.answer for r in read_rated(path, "all")] == ["a\u2028b", "c\x85d"]


def test_a_system_message_that_all_share_does_not_put_all_in_one_part():
    parts = {Document(turns=(("system", "s"), ("user", f"q{i}"))).part for i in range(20)}
    assert parts == {"calibration", "evaluation"}


def test_a_limit_that_leaves_one_rating_is_named_before_a_model_is_loaded(tmp_path):
    path = rated_file(tmp_path, [("hi", "aa", "up"), ("hi", "bb", "up"), ("hi", "cc", "down")])
    with pytest.raises(ConfigError, match="2 of 3 answers"):
        check_tasks([str(path)], limit=2, part="all")


def test_rated_answers_are_scored_with_an_adapter(llm, tmp_path):
    path = rated_file(tmp_path, [("hi", "aa", "up"), ("hi", "bb", "down")])
    with pytest.raises(AdapterError, match="enable_lora"):
        run_tasks(llm, [str(path)], part="all", lora_request=LoRARequest("a", 1, str(tmp_path)))
    with pytest.raises(ConfigError, match="lora_request"):
        run_tasks(llm, ["hellaswag"], lora_request=LoRARequest("a", 1, str(tmp_path)))


def test_the_command_and_its_report_print_both_metrics_with_their_pairs(model, tmp_path, capsys):
    given = [("hi", "aa", "up"), ("hi", "bb", "up"), ("hi", "cc", "down"), ("ho", "dd", "down")]
    path = rated_file(tmp_path, given)
    (tmp_path / "text.txt").write_text("hello the world in the hour " * 5)
    words = ["eval", str(model[0]), f"--text={tmp_path}/text.txt", "--part=all", "--context=32"]
    words += ["--dtype=float32", "--device=cpu", "--num-threads=1", f"--tasks={path}"]
    counts = ["2 pairs of 3 rated answers", "4 pairs of 4 rated answers"]
    assert main(words) == 0
    shown = re.findall(r"(preferred|auc) .* on (.*)", capsys.readouterr().out)
    assert shown == [*zip(("preferred", "auc"), counts, strict=True)]
    report = tmp_path / "report"
    assert main([*words, "--kv-cache-dtype-b=int8", f"--report={report}"]) == 0
    assert re.findall(r"(preferred|auc) .* → .* on (.*)", capsys.readouterr().out) == shown
    page = (report / "slipstream-report.html").read_text()
    assert all(f"{metric}, {count}" in page for metric, count in shown)
