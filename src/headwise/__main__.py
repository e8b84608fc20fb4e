"""The command `headwise`, also as `python -m headwise`: one line where its extras are missing."""

import sys


def main() -> int:
    try:
        from headwise.cli import run

        return run(sys.argv[1:])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"click", "rich"}:
            raise
        from headwise.extras import missing, needed

        sys.stderr.write(f"headwise: the command line {needed(*missing('click', 'rich'))}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
