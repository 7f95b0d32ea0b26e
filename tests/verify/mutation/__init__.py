"""The mutation test of verify: faulty graphs whose faults an oracle of its own has shown, and how many verify finds.

`artifacts` are the sound files, `random_faults` and `corner_faults` change them, `inputs` and `oracle` show that a
change is a fault, `scoring` asks verify, `sound_specs` draws specs that must pass, and `page` writes the result.
"""
