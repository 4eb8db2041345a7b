"""The option of trials."""

OPTIONS = {
    "trials": {
        "choices": ("operators", "all", "none"),
        "default": "operators",
        "help": "what may be tried of what the findings advise, on copies, within five seconds in "
        "which the training stands still: PyTorch's optimizers and operators, all of it with your "
        "modules and data set, or nothing (default: operators)",
    },
}
