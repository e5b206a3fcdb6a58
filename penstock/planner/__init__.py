"""The planner answers what a traffic needs: memory, step times, replicas and money for a model on given hardware.

Formulas come from the sizes of the model and the data sheet of the hardware; the simulator, with the scheduler that
serves, says which share of the requests meets its targets. Never imports torch."""
