# In the worktree's root, on a machine with AMX: operators by the tree's integer tiles, then by those of tiles_phases.h, then the sketches.
show() { grep -v "embed\|written\|^$" $1 | sed 's/  */ /g'; }
python -m slipstream.kernels.build > /tmp/build.log 2>&1
python benchmarks/kernels.py --device cpu --op shares --isas avx512-vbmi2 amx --threads 2 --output /tmp/shares.json > /tmp/shares1.txt 2>&1
cp csrc/cpu/tiles_whole.h /tmp/tiles_whole.h; cp benchmarks/micro/tiles_phases.h csrc/cpu/tiles_whole.h
python -m slipstream.kernels.build > /tmp/build2.log 2>&1
python benchmarks/kernels.py --device cpu --op shares --isas amx --forms int8 Q4_1 --threads 2 --output /tmp/shares.json > /tmp/shares2.txt 2>&1
python -m pytest tests/kernels/test_cpu_tiles.py -q -n 0 2>&1 | grep -E "passed|failed"
cp /tmp/tiles_whole.h csrc/cpu/tiles_whole.h
g++ -O3 -std=c++17 -march=sapphirerapids -ffp-contract=off benchmarks/micro/tiles.cpp -o /tmp/tiles && taskset -c 0 /tmp/tiles > /tmp/tiles.txt
echo "== shares, amx with a line of steps"; show /tmp/shares1.txt; echo "== shares, phases"; show /tmp/shares2.txt; echo "== sketches"; show /tmp/tiles.txt
