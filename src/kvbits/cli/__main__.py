from kvbits.cli import main

main()
