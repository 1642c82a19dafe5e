use std::path::Path;
use ster_core::*;
fn main() {
    let dir = std::env::args().nth(1).unwrap();
    let threads: usize = std::env::args().nth(2).map_or(2, |s| s.parse().unwrap());
    let m = SteeringLlama::load(Path::new(&dir), Some(threads)).unwrap();
    let plan = SteeringPlan::default();
    let mut best = f64::MAX;
    for _ in 0..5 {
        let mut cache = m.cache();
        let ids: Vec<u32> = (0..32).map(|i| (i * 7919 % (m.config().vocab - 10)) as u32).collect();
        let mut next = ids;
        let mut t = std::time::Instant::now();
        for step in 0..65 {
            if step == 1 {
                t = std::time::Instant::now();
            }
            let mut s = [Sequence {
                tokens: &next,
                cache: Some(&mut cache),
                steering: &plan,
                capture: CapturePlan::nothing(),
                logits: LogitRows::Last,
            }];
            let out = m.forward(&mut s, &|| false).unwrap();
            let b = out[0].logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
            next = vec![b as u32];
        }
        best = best.min(t.elapsed().as_secs_f64());
    }
    println!("decode {:.1} tok/s", 64.0 / best);
}
