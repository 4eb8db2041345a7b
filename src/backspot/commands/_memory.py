"""The options about memory."""

OPTIONS = {
    "memory": {
        "action": "store_true",
        "help": "record what is in memory too, in the same steps, and who made each block of a "
        "GPU, should it run out",
    },
}
ORDERS = {"memory": "what it has in memory at the peak"}
