"""The command `headwise`, also as `python -m headwise`: one line where its extras are missing."""

import sys


def main() -> int:
    try:
        from headwise.cli import run
    except ModuleNotFoundError as error:
        if error.name not in {"click", "rich"}:
            raise
        sys.stderr.write(f'headwise: the command line needs {error.name}; run: pip install "headwise[look]"\n')
        return 2
    except KeyboardInterrupt:
        return 130
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
