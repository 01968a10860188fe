"""The host benchmark measures what it says it does; its numbers are for the machine that it runs on."""

from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_the_warm_call_is_warm_and_the_first_load_loads(run_with_stub):
    run = run_with_stub(
        f"""
        import sys
        sys.path.insert(0, {str(SCRIPTS)!r})
        import bench_host
        (cold,) = bench_host.first_load_bare()
        assert cold > 0 and "torch" not in sys.modules
        bench_host._CALLS = 3
        assert len(bench_host.warm_call()) == 3
        """
    )
    assert len(run.named("cuLibraryLoadData")) == 1
    assert [call["call"] for call in run.calls[-7:-1]] == ["cuCtxGetCurrent", "cuLaunchKernelEx"] * 3
