"""How much: the clock's time, dealt out to modules and to the phases of a step."""
