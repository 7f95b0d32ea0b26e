"""`python -m posexport`: the command line."""

from posexport.cli import main

main()
