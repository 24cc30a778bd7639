# Prepares a machine that has torch and no network: sourced from the repository root, with the folder CARRY (.carry)
# beside it: whl/ holds wheels of ultralytics and what it needs, polars.tar.xz an unpacked polars. It makes a virtual
# environment on top of the running one, installs this tree into it, and puts it first on PATH.
set -e
carry="${CARRY:-.carry}"
work=$(mktemp -d)
site_packages='import sysconfig; print(sysconfig.get_path("purelib"))'
python3 -m venv --without-pip "$work/venv"
site=$("$work/venv/bin/python3" -c "$site_packages")
python3 -c "$site_packages" >"$site/below.pth"
install="python3 -m pip --python $work/venv/bin/python3 install -q --disable-pip-version-check --no-index --no-deps"
$install --no-compile "$carry"/whl/*.whl
tar xJf "$carry/polars.tar.xz" -C "$site"
$install --no-build-isolation -e .
printf '#!%s\nfrom pytest import main\nraise SystemExit(main())\n' "$work/venv/bin/python3" >"$work/venv/bin/pytest"
chmod +x "$work/venv/bin/pytest"
export PATH="$work/venv/bin:$PATH" PYTHONUNBUFFERED=1
export YOLO_OFFLINE=true YOLO_CONFIG_DIR="$work/config" MPLBACKEND=Agg
# Every fit looks for this font, and asks the network for one that is not there: without an answer, for minutes.
mkdir -p "$YOLO_CONFIG_DIR/Ultralytics"
cp "$(python3 -c 'import matplotlib; print(matplotlib.get_data_path())')/fonts/ttf/DejaVuSans.ttf" "$YOLO_CONFIG_DIR/Ultralytics/Arial.ttf"
# amp=True asks the network for weights to check the GPU with. Any that load will do.
mkdir -p "$work/weights"
python3 - "$work/weights" <<'PYTHON' >/dev/null
import sys
from ultralytics import YOLO
from ultralytics.utils import SETTINGS
SETTINGS.update(weights_dir=sys.argv[1])
YOLO("yolo26n.yaml").save(f"{sys.argv[1]}/yolo26n.pt")
PYTHON
