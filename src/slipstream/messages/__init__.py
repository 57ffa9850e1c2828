"""The messages between front end, engine core, scheduler and worker. No torch.

1. They consist of plain Python values, so that msgpack can carry them.
2. Requests, plans and results are frozen: a request can't be changed after it was passed to the scheduler.
3. Messages created for each request in each step are named tuples, which cost a third of the time
   of frozen dataclasses.

    user ── SamplingParams ──> EngineRequest ──> Scheduler ── StepPlan ──> ModelRunner
    user <── RequestOutput <── EngineOutput  <── Scheduler <── StepResult <──┘
"""
