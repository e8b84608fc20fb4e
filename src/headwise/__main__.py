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
        sys.stderr.write(f'headwise: the command line needs {package}; run: pip install "headwise[look]"\n')
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
