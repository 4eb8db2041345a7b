"""The options about memory."""

OPTIONS = {
    "memory": {
        "action": "store_true",
        "help": "record what is in memory too, in the same steps, and on a GPU who made each "
        "block, for a training that runs out of memory",
    },
}
ORDERS = {"memory": "what it has in memory at the peak"}
