"""The messages between front end, engine core, scheduler and worker. No torch.

1. They consist of plain Python values, so that msgpack can carry them.
2. Requests, plans and results are frozen: nobody can change a request that the scheduler has.
3. Messages made for each request of each step are named tuples, which cost a third of a frozen
   dataclass.

    user ── SamplingParams ──> EngineRequest ──> Scheduler ── StepPlan ──> ModelRunner
    user <── RequestOutput <── EngineOutput  <── Scheduler <── StepResult <──┘
"""
