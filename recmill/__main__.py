from recmill.cli import main

main()
