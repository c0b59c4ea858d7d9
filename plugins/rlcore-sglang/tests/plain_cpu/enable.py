"""`ENVIRONMENT/bin/python enable.py`: make SGLang in that virtual environment use plain PyTorch. For tests only."""

import sysconfig
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main():
    target = Path(sysconfig.get_path("purelib")) / "sglang_plain_cpu.pth"
    target.write_text(f"{FOLDER}\nimport torchvision_ops\n", encoding="utf-8")
    print(f"{target} points to {FOLDER}")


if __name__ == "__main__":
    main()
