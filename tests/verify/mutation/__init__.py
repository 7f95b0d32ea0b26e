"""The mutation test of verify.

It makes faulty graphs, shows each fault with an independent oracle, and counts how many faults verify finds.
`artifacts` are the sound files. `random_faults`, `constant_faults` and `corners` change them. `inputs` and `oracle`
show that a change is a fault. `scoring` runs verify. `sound_specs` draws specs that must pass. `page` writes the
result.
"""
