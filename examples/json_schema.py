"""Make every answer valid JSON of a schema."""

import json

from slipstream import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "million_people": {"type": "integer", "minimum": 0, "maximum": 50},
    },
    "required": ["city", "country", "million_people"],
    "additionalProperties": False,
}

with LLM("smollm2", max_model_len=1024) as llm:
    sampling = SamplingParams(
        temperature=0, max_tokens=80, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    (answer,) = llm.generate("The capital of France as JSON:", sampling)
    print(json.loads(answer.outputs[0].text))
