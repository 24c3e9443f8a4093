# A router, or replicas without an accelerator. From the repository's root:
#
#     docker build -f configs/docker/cpu.Dockerfile -t jlora:cpu .
FROM python:3.13-slim
WORKDIR /opt/jlora
COPY pyproject.toml README.md LICENSE ./
COPY scripts scripts
COPY requirements requirements
COPY jlora jlora
# The script that continuous integration sets its environments up with.
RUN sh scripts/setup.sh --venv /opt/venv --locked requirements --extras ray,otel
ENV PATH=/opt/venv/bin:$PATH
RUN useradd --create-home --uid 10001 jlora
USER 10001
EXPOSE 50051 8000
ENTRYPOINT ["jlora"]
