// Vercel's AI SDK: OpenAI's provider (responses, its default, and chat), the compatible one, and Anthropic's.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [base, model] = process.argv.slice(2);
const given = { baseURL: base + "/v1", apiKey: "none" };
const openai = createOpenAI(given);
const models = {
  responses: openai(model),
  chat: openai.chat(model),
  compatible: createOpenAICompatible({ name: "here", ...given, includeUsage: true })(model),
  anthropic: createAnthropic(given)(model),
};
for (const [name, model] of Object.entries(models)) {
  for (const run of [generateText, streamText]) {
    const asked = [];
    const get_weather = tool({
      description: "The weather.",
      inputSchema: jsonSchema({
        type: "object",
        properties: { city: { type: "string" } },
        required: ["city"],
      }),
      execute: async ({ city }) => (asked.push(city), "sunny"),
    });
    const answer = await run({
      model,
      prompt: "The weather in Paris and in Rome?",
      tools: { get_weather },
      stopWhen: stepCountIs(4),
      maxRetries: 0,
    });
    assert.equal(await answer.text, "Both are sunny.", name);
    assert.deepEqual(asked, ["Paris", "Rome"], name);
    assert((await answer.totalUsage).outputTokens > 0, name);
  }
}
