// OpenAI's JavaScript client: its runner of tools over chat, whole and streamed, and a loop over responses.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [base, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: base + "/v1", apiKey: "none" });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const question = "The weather in Paris and in Rome?";
for (const stream of [false, true]) {
  const asked = [];
  const run = client.chat.completions.runTools({
    model,
    stream,
    messages: [{ role: "user", content: question }],
    tools: [{
      type: "function",
      function: {
        name: "get_weather",
        parameters,
        parse: JSON.parse,
        function: ({ city }) => (asked.push(city), "sunny"),
      },
    }],
  });
  assert.equal(await run.finalContent(), "Both are sunny.");
  assert.deepEqual(asked, ["Paris", "Rome"]);
}
for (const stream of [false, true]) {
  const asked = [];
  const tools = [{ type: "function", name: "get_weather", parameters, strict: false }];
  let input = [{ role: "user", content: question }], answer, previous;
  for (let turn = 0; turn < 3; turn++) {
    const body = { model, tools, input, previous_response_id: previous };
    answer = stream
      ? await client.responses.stream(body).finalResponse()
      : await client.responses.create(body);
    previous = answer.id;
    const calls = answer.output.filter((item) => item.type === "function_call");
    input = calls.map((call) => {
      asked.push(JSON.parse(call.arguments).city);
      return { type: "function_call_output", call_id: call.call_id, output: "sunny" };
    });
    if (!calls.length) break;
  }
  assert.equal(answer.output_text, "Both are sunny.");
  assert.deepEqual(asked, ["Paris", "Rome"]);
}
