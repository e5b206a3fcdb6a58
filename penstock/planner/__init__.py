"""The planner estimates what a workload needs: memory, step times, replicas and cost of a model on given hardware.

Formulas come from the sizes of the model and the data sheet of the hardware; the simulator, with the scheduler that
serves, says which share of the requests meets its targets. Never imports torch."""
