"""Find the likeliest continuations by beam search."""

from slipstream import LLM, BeamSearchParams

with LLM("smollm2", max_model_len=1024) as llm:
    params = BeamSearchParams(beam_width=4, max_tokens=8)
    (output,) = llm.beam_search("The capital of France is", params)
    for sequence in output.sequences:
        print(round(sequence.score, 3), repr(sequence.text))
